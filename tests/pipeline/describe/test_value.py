"""`Pipeline` is a value: comparable, hashable, picklable, subclassable, immutable, with a complete repr."""

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import recipe_factories
import torch
from drivetrain import Classification, Pipeline, PlanError
from drivetrain.common.frozen import FrozenDict
from drivetrain.pipeline.describe.config import FitOptions
from drivetrain.strategies import DDP
from drivetrain.transforms import EMA, BlurPool, LabelSmoothing


def full(kind: type[Pipeline] = Pipeline) -> Any:
    """A pipeline in which no field has its default."""
    made = (
        kind(recipe_factories.small, seed=3, classes=4)
        .load("a.beton", "b.beton", batch_size=8, image_size=16, workers=1, scale=(0.5, 1.0))
        .transform(BlurPool(min_channels=8), EMA(10))
        .task(Classification(metrics=("top1", "f1")))
        .optimize("sgd", lr=0.1, momentum=0.9, schedule="linear", base_batch_size=16)
        .distribute("ddp", devices=2, precision="bf16", device="cpu", activation_checkpointing=["B", "A"])
    )
    return made.replace(epochs=3, recipe="mine", fit_options=FitOptions(eval_every=2))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "model": lambda p: p.replace(model=recipe_factories.Small),
    "model_options": lambda p: p.replace(model_options={"classes": 5}),
    "optimization": lambda p: p.optimize("sgd", lr=0.2),
    "data": lambda p: p.load("a.beton", "b.beton", batch_size=8, image_size=16, workers=1, scale=(0.4, 1.0)),
    "transforms": lambda p: p.transform(LabelSmoothing(0.1)),
    "distribution": lambda p: p.distribute("ddp", devices=2, device="cpu"),
    "goal": lambda p: p.task(Classification(metrics=("top1",))),
    "seed": lambda p: p.replace(seed=4),
    "epochs": lambda p: p.replace(epochs=4),
    "recipe": lambda p: p.replace(recipe=None),
    "fit_options": lambda p: p.replace(fit_options=FitOptions(eval_every=3)),
}


def test_equal_pipelines_are_equal() -> None:
    one, other = full(), full()
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Pipeline)}
    assert one != "a pipeline"
    module = recipe_factories.small()
    assert Pipeline(module) == Pipeline(module)
    assert Pipeline(module) != Pipeline(recipe_factories.small())  # other weights


@pytest.mark.parametrize("field", CHANGES)
def test_each_field_counts_and_is_shown(field: str) -> None:
    one = full()
    changed = CHANGES[field](one)
    assert getattr(changed, field) != getattr(one, field)
    assert changed != one
    assert repr(changed) != repr(one)
    assert changed._repr_html_() != one._repr_html_()
    assert one == full()  # which the change has left alone


def test_a_notebook_shows_a_table_of_the_stages() -> None:
    """In the page's own colors, so that it is readable in the dark."""
    page = full().load("<a>.beton", batch_size=8, image_size=16, scale=(0.5, 1.0))._repr_html_()
    heads = re.findall(r"<tr><t[dh] style='text-align:left'>(.*?)</t[dh]>", page)
    assert heads == ["Pipeline", "data", "model", "task", "transforms", "optimizer", "strategy", "run"]
    assert "&#x27;&lt;a&gt;.beton&#x27;<br>batch_size=8, image_size=16, scale=(0.5, 1.0)<" in page
    assert re.search(r">BlurPool\(.*min_channels=8.*\)<br>EMA\(", page)
    assert "color" not in page
    empty = Pipeline(recipe_factories.small)._repr_html_()
    assert "none: add .load(…)" in empty
    assert "transforms" not in empty
    assert "single" in empty


def test_copies_are_equal() -> None:
    one = full()
    for other in (
        pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one), dataclasses.replace(one),
    ):  # fmt: skip
        assert other == one
        assert type(other) is Pipeline
        assert repr(other) == repr(one)


def test_dataclasses_replace_changes_one_field_and_keeps_the_others() -> None:
    one = full()
    other = dataclasses.replace(one, seed=9)
    assert (other.seed, other) == (9, one.replace(seed=9))
    assert dataclasses.replace(other, seed=3) == one
    for wrong, message in (
        ({"seed": -1}, "seed=-1"), ({"model": 3}, "not 3"), ({"sead": 1}, "no field 'sead'"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            dataclasses.replace(one, **wrong)


class Mine(Pipeline):
    """With a method of its own."""

    def small(self) -> Any:
        return self.replace(seed=1)


class Fixed(Pipeline):
    """With another constructor, and an attribute that is not a field."""

    def __init__(self, name: str) -> None:
        super().__init__(recipe_factories.small, classes=4)
        self.name = name


def test_every_method_returns_the_subclass() -> None:
    assert type(full(Mine)) is Mine
    assert type(full(Mine).small()) is Mine
    assert full(Mine) != full()
    assert repr(full(Mine)).startswith("Mine(")
    assert type(Mine.from_recipe("baseline", epochs=2).transform(BlurPool())) is Mine
    fixed = Fixed("here").load("a.beton", batch_size=8, image_size=16).optimize("adamw", lr=1e-3)
    assert (type(fixed), fixed.name, fixed.optimization is not None) == (Fixed, "here", True)
    again = pickle.loads(pickle.dumps(fixed))
    assert (again, again.name) == (fixed, "here")


def test_nothing_in_it_changes() -> None:
    sizes, settings, policy = [1, 2], {"scale": [0.5, 1.0]}, ["A"]
    one = (
        Pipeline(recipe_factories.small, sizes=sizes)
        .load("a.beton", batch_size=8, image_size=16, **settings)
        .optimize("sgd", lr=0.1)
        .distribute("ddp", device="cpu", activation_checkpointing=policy)
    )
    before, shown = copy.deepcopy(one), repr(one)
    sizes.append(3)
    settings["scale"].append(0)
    policy.append("B")
    assert one.data is not None
    one.model_options["sizes"].append(4)
    for options in (one.model_options, one.data.settings, one.optimization.options, one.distribution.options):
        assert isinstance(options, FrozenDict)
        with pytest.raises(TypeError):
            options["lr"] = 3  # type: ignore[index]
    for target, name in (
        (one, "seed"), (one.data, "train"), (one.distribution, "devices"), (one.data.settings, "x"),
    ):  # fmt: skip
        with pytest.raises(AttributeError):
            setattr(target, name, 3)
    assert (one, repr(one)) == (before, shown)
    assert one.model_options["sizes"] == [1, 2]  # still a list, which the factory may want


def test_the_repr_is_the_calls_that_were_made() -> None:
    one = full()
    assert repr(one) == (
        "Pipeline(small, seed=3, classes=4)\n"
        "  .load('a.beton', 'b.beton', batch_size=8, image_size=16, workers=1, scale=(0.5, 1.0))\n"
        "  .task(Classification(metrics=('top1', 'f1')))\n"
        "  .transform(BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True, min_channels=8), "
        "EMA(half_life=10, smoothing=None, update_every=1))\n"
        "  .optimize('sgd', lr=0.1, momentum=0.9, schedule='linear', base_batch_size=16)\n"
        "  .distribute('ddp', devices=2, precision='bf16', activation_checkpointing=('A', 'B'), device='cpu')\n"
        "  # recipe 'mine', epochs=3, eval_every=2"
    )
    assert repr(Pipeline(recipe_factories.small)) == "Pipeline(small)"
    assert "DDP(" in repr(Pipeline("resnet18").distribute(DDP(device="cpu")))


def test_options_that_do_not_compare_to_a_truth() -> None:
    def made(*values: float) -> Pipeline:
        return Pipeline(recipe_factories.small, weights={"of": [torch.tensor(values)]})

    assert made(1.0, 2.0) == made(1.0, 2.0)
    assert made(1.0, 2.0) != made(1.0, 3.0)
    assert hash(made(1.0, 2.0)) == hash(made(1.0, 2.0))
