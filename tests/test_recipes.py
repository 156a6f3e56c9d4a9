"""Recipes: plain dicts that complete, plan and train, that nothing changes, and whose errors help."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import RECIPES, Pipeline, RecipeError
from drivetrain.loaders import convert
from drivetrain.pipeline.recipes import DEFAULTS, KEYS, complete, parse_overrides
from drivetrain.transforms import BlurPool, ChannelsLast, LabelSmoothing
from pipeline_data import CLASSES, SIDE, Toy, toy_arrays

AT_FIRST = copy.deepcopy(RECIPES)
DEFAULTS_AT_FIRST = copy.deepcopy(DEFAULTS)


@pytest.fixture(autouse=True)
def _nothing_changes_the_tables() -> Any:
    yield
    assert RECIPES == AT_FIRST
    assert DEFAULTS == DEFAULTS_AT_FIRST


def tiny(toy: Toy, **overrides: Any) -> dict[str, Any]:
    """Overrides that bring a recipe down to the toy data."""
    own = {
        "train": toy.train, "val": toy.val, "batch_size": 32, "image_size": SIDE, "workers": 1, "devices": 1,
        "model_options.num_classes": CLASSES, "epochs": 1,
    }  # fmt: skip
    return own | overrides


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_json_and_names_every_key(name: str) -> None:
    assert json.loads(json.dumps(RECIPES[name])) == RECIPES[name]
    full = complete(name)
    assert set(full) == {*KEYS, "name"}
    assert full["name"] == name
    assert full["description"]
    assert full["source"]
    assert json.loads(json.dumps(full)) == full
    assert complete(full) == full  # written out, it is a recipe again


@pytest.mark.parametrize("name", ["baseline", "cifar10-quickstart"])
def test_a_recipe_trains(name: str, toy: Toy) -> None:
    workers = 0 if RECIPES[name].get("loader") == "torch" else 1  # no processes: they take seconds to start
    pipeline = Pipeline.from_recipe(name, **tiny(toy, workers=workers, **{"model_options.width": 4}))
    result = pipeline.fit(progress=False)
    assert len(result.history.epochs) == 1  # the recipe's
    assert result.accuracy is not None
    assert result.history.to_dict()["recipe"] == name


def test_every_value_of_a_recipe_arrives(toy: Toy) -> None:
    recipe = complete("cifar10-quickstart") | {
        "train": toy.train, "val": toy.val, "workers": 3, "accumulate": 2, "clip_norm": 0.5, "seed": 11,
        "epochs": 7, "batch_size": 64, "image_size": SIDE, "devices": 2, "strategy": "ddp",
    }  # fmt: skip
    pipeline = Pipeline.from_recipe(recipe)
    data, how, optimization = pipeline.data, pipeline.distribution, pipeline.optimization
    assert data is not None
    assert (data.train, data.val, data.batch_size, data.image_size) == (toy.train, toy.val, 64, SIDE)
    assert (data.loader, data.workers, data.settings["mean"]) == ("ffcv", 3, (0.4914, 0.4822, 0.4465))
    assert pipeline.transforms == (BlurPool(), ChannelsLast(), LabelSmoothing(0.1))
    assert (how.strategy, how.devices, how.precision) == ("ddp", 2, "bf16")
    assert (how.accumulate, how.clip_norm) == (2, 0.5)
    assert optimization.options == {"lr": 0.3, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    assert (optimization.schedule, optimization.warmup) == ("linear", 0.25)
    assert (pipeline.seed, pipeline.epochs, pipeline.model_options["width"]) == (11, 7, 16)
    assert pipeline.plan().steps


def test_resnet50_mild_is_what_it_says() -> None:
    recipe = complete("resnet50-mild")
    decoupled = 5e-4  # Composer's, per step, at the peak of the learning rate
    optimizer = recipe["optimizer"]
    assert optimizer["lr"] * optimizer["weight_decay"] / (1 - optimizer["momentum"]) == pytest.approx(
        decoupled, rel=0.05
    )
    assert "Not measured by us yet" in recipe["description"]
    assert [entry["name"] for entry in recipe["transforms"]] == ["BlurPool", "ChannelsLast", "LabelSmoothing"]
    pipeline = Pipeline.from_recipe("resnet50-mild")
    assert pipeline.epochs is not None
    assert pipeline.epochs < 60
    plan = pipeline.distribute("ddp", devices=8, precision="bf16", device="cpu").plan()
    whole = json.dumps(plan.to_dict(), ensure_ascii=False)
    for stage in ("ffcv loader", "BlurPool", "ChannelsLast", "LabelSmoothing", "warm-up 22%", "8 device(s)"):
        assert stage in whole


def test_resnet50_mild_trains_two_steps(tmp_path: Path) -> None:
    convert(toy_arrays(4, 0, side=64), tmp_path / "t.beton", classes="abcd", progress=False)
    pipeline = Pipeline.from_recipe(
        "resnet50-mild", train=tmp_path / "t.beton", val=None, batch_size=2, image_size=64, devices=1,
        strategy="single", epochs=1, workers=1, **{"model_options.num_classes": 4, "model_options.width_per_group": 8},
    )  # fmt: skip
    result = pipeline.fit(progress=False)
    assert np.isfinite(result.history.epochs[0].loss)
    blurred = {report.transform: report.changed for report in result.reports}["BlurPool"]
    assert "maxpool" in " ".join(blurred)


def test_overrides_reach_into_dicts_and_leave_the_rest(toy: Toy) -> None:
    pipeline = Pipeline.from_recipe(
        "baseline", **tiny(toy), **{"optimizer.lr": 0.7, "loading.padding": 2, "model_options.width": 8}
    )
    assert pipeline.optimization.options["lr"] == 0.7
    assert pipeline.optimization.options["momentum"] == 0.9
    assert pipeline.data is not None
    assert (pipeline.data.settings["padding"], pipeline.data.settings["crop"]) == (2, "padded")
    assert pipeline.model_options == {"num_classes": CLASSES, "width": 8}


def test_what_is_done_with_a_completed_recipe_stays_there() -> None:
    full = complete("baseline")
    full["loading"]["padding"] = 99
    full["transforms"].append("mine")
    assert complete("baseline")["loading"]["padding"] == 4
    assert complete("cifar10-quickstart")["loading"]["padding"] == 4


def test_a_dict_is_a_recipe(toy: Toy) -> None:
    recipe = {
        "model": "cifar_resnet", "model_options": {"num_classes": CLASSES, "width": 4}, "train": toy.train,
        "batch_size": 32, "image_size": SIDE, "optimizer": {"name": "adamw", "lr": 0.01}, "epochs": 1,
    }  # fmt: skip
    before = copy.deepcopy(recipe)
    result = Pipeline.from_recipe(recipe, workers=1).fit(progress=False)
    assert recipe == before
    assert result.history.to_dict()["recipe"] is None
    assert torch.isfinite(next(result.model.parameters())).all()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"bach_size": 3}, "no key 'bach_size'.*Did you mean 'batch_size'"),
    "dotted key": ({"bach.size": 3}, "no key 'bach'"),
    "dotted key of a number": ({"epochs.x": 3}, "'epochs.x': the recipe's epochs is not a dict"),
    "model": ({"model": "cifar_resnt"}, "'cifar_resnt'.*Did you mean 'cifar_resnet'"),
    "model of another kind": ({"model": 3}, "model=3 has the wrong type; it is: name of the model"),
    "no dict": ({"loading": [1]}, "loading=.1. has the wrong type"),
    "transforms": ({"transforms": {"name": "BlurPool"}}, "transforms=.* has the wrong type; it is: list"),
    "transform": ({"transforms": [{"name": "BlurPol"}]}, "baseline: .*'BlurPol'.*Did you mean 'BlurPool'"),
    "transform without a name": ({"transforms": ["BlurPool"]}, "'BlurPool' must be a dict with a name"),
    "transform's option": (
        {"transforms": [{"name": "BlurPool", "min_chanels": 3}]},
        "'min_chanels'.*'min_channels'",
    ),
    "optimizer without a name": ({"optimizer": {"lr": 3}}, "optimizer=.* needs a name"),
    "optimizer": ({"optimizer.name": "sdg"}, "baseline: .*'sdg'.*Did you mean 'sgd'"),
    "optimizer's option": ({"optimizer.momentm": 1}, "baseline: .*'momentm'"),
    "strategy": ({"strategy": "dpd"}, "baseline: .*'dpd'.*Did you mean 'ddp'"),
    "loader": ({"loader": "fcv"}, "baseline: .*'fcv'.*Did you mean 'ffcv'"),
    "loader setting": ({"loading.pading": 3}, "baseline: .*'pading'.*Did you mean 'padding'"),
    "argument twice": ({"loading.batch_size": 3}, "baseline: .*batch_size"),
    "batch size as text": ({"batch_size": "many"}, "baseline: .*batch_size='many'"),
    "epochs": ({"epochs": 0}, "epochs=0 must be an integer from 1 on"),
    "epochs as text": ({"epochs": "3"}, "epochs='3' must be"),
    "seed": ({"seed": None}, "baseline: seed=None must be"),
    "warm-up": ({"warmup": "long"}, "baseline: warmup='long'"),
    "workers": ({"workers": "all"}, "baseline: workers='all'"),
    "devices": ({"devices": 1.5}, "baseline: devices=1.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_means_nothing(name: str) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        Pipeline.from_recipe("baseline", **overrides)


def test_a_recipe_that_is_none() -> None:
    with pytest.raises(RecipeError, match=r"'baselin'.*Did you mean 'baseline'.*Known: "):
        Pipeline.from_recipe("baselin")
    with pytest.raises(RecipeError, match="name or a dict, not 3"):
        Pipeline.from_recipe(3)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="has no 'model': name of the model"):
        Pipeline.from_recipe({"epochs": 3})


def test_overrides_of_the_command_line() -> None:
    found = parse_overrides(
        ["epochs=3", "optimizer.lr=1e-2", "val=null", "transforms=[]", "train=a=b.beton", "precision=bf16"]
    )
    assert found == {
        "epochs": 3, "optimizer.lr": 0.01, "val": None, "transforms": [], "train": "a=b.beton", "precision": "bf16"
    }  # fmt: skip
    for wrong in ("epochs", "=3"):
        with pytest.raises(RecipeError, match=f"'{wrong}' is not KEY=VALUE"):
            parse_overrides([wrong])
