"""Optimizers by name, class and dotted name; learning rate and batch size: what the plan states, and `scale_lr`."""

import math
from typing import Any

import own_schedules
import pytest
import torch
from drivetrain import NonFiniteError, Pipeline, PlanError, RecipeError
from drivetrain.pipeline.describe.plan import Step
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.optim.config import OptimizerConfig
from drivetrain.pipeline.recipes.presets import completed, parse_overrides
from drivetrain.pipeline.training.build import optimizer_factory
from pipeline_data import Toy, plain_model
from same_runs import assert_resumes
from torch import nn

ONE = {"strategy": "single", "devices": 1, "strategy_options.device": "cpu"}


def recipe(name: str, **overrides: Any) -> Pipeline:
    return Pipeline.from_recipe(name, **ONE, **overrides)


def row(pipeline: Pipeline) -> Step:
    (found,) = (step for step in resolve(pipeline, files=False).steps if step.what.startswith("optimizer"))
    return found


def rate(pipeline: Pipeline) -> float:
    """The peak learning rate that the optimizer gets."""
    return float(optimizer_factory(resolve(pipeline, files=False))(nn.Linear(2, 2).parameters()).param_groups[0]["lr"])


def test_another_batch_size_than_the_recipes_is_noted() -> None:
    pipeline = recipe("resnet50-mild", batch_size=64)
    caution = row(pipeline).caution
    for part in (
        "lr=2.048 is for batches of 2,048 images", "per image is 32 times", "scale_lr=True makes it 0.064",
    ):  # fmt: skip
        assert part in caution
    assert rate(pipeline) == 2.048
    assert "per image is 1/4 of that" in row(recipe("resnet50-mild", batch_size=8192)).caution
    data: dict[str, Any] = {"batch_size": 64, "image_size": 176}
    assert row(recipe("resnet50-mild").load("a.beton", **data)).caution == caution


@pytest.mark.parametrize(
    "overrides",
    [
        {}, {"batch_size": 2048}, {"batch_size": 64, "optimizer.lr": 0.064},
        {"batch_size": 64, "optimizer": {"name": "sgd", "lr": 0.1}}, {"batch_size": 64, "base_batch_size": None},
    ],
)  # fmt: skip
def test_nothing_is_noted_where_both_or_none_were_changed(overrides: dict[str, Any]) -> None:
    found = row(recipe("resnet50-mild", **overrides))
    assert found.caution == ""
    assert "images" not in found.why


@pytest.mark.parametrize(
    ("name", "size", "kind", "factor"),
    [
        ("resnet50-mild", 64, "linear", 1 / 32), ("resnet50-mild", 4096, "linear", 2.0),
        ("resnet50-mild", 2048, "", 1.0),
        ("ffcv-resnet18-16", 256, "linear", 1 / 4), ("vit-s16", 64, "square root", 1 / 4),
    ],
)  # fmt: skip
def test_scale_lr(name: str, size: int, kind: str, factor: float) -> None:
    base = completed(name).values
    pipeline = recipe(name, batch_size=size, scale_lr=True)
    lr = base["optimizer"]["lr"] * factor
    assert rate(pipeline) == pytest.approx(lr)
    found = row(pipeline)
    assert f"lr={lr:.4g}" in found.what
    for part in (
        f"lr={base['optimizer']['lr']:g}", f"{base['batch_size']:,} images", f"{lr:.4g} for {size:,}", kind,
    ):  # fmt: skip
        assert part in found.why


def test_it_comes_back_from_a_recipe() -> None:
    for overrides in ({"scale_lr": True}, {"scale_lr": True, "batch_size": 64}, {"batch_size": 64}):
        pipeline = recipe("resnet50-mild", **overrides)
        again = Pipeline.from_recipe(pipeline.to_recipe())
        assert again == pipeline
        assert resolve(again, files=False).steps == resolve(pipeline, files=False).steps
        assert rate(again) == rate(pipeline)
    parsed = parse_overrides(["scale_lr=true", "base_batch_size=256"])
    assert parsed == {"scale_lr": True, "base_batch_size": 256}


def test_a_recipe_may_name_its_base(toy: Toy) -> None:
    """As publications do: so much per 256 images."""
    values = {
        "model": "cifar_resnet", "train": toy.train, "batch_size": 64, "image_size": 16,
        "optimizer": {"name": "sgd", "lr": 0.1}, "base_batch_size": 256, "scale_lr": True,
    }  # fmt: skip
    assert rate(Pipeline.from_recipe(values)) == pytest.approx(0.025)
    assert rate(Pipeline.from_recipe(values, batch_size=128)) == pytest.approx(0.05)


def test_in_the_builder(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model)  # a batch of 32
    scaled = pipeline.optimize("adamw", lr=0.01, base_batch_size=8, scale_lr=True)
    assert rate(scaled) == pytest.approx(0.02)
    assert rate(pipeline.optimize("sgd", lr=0.1, base_batch_size=8)) == 0.1
    mild = recipe("resnet50-mild", batch_size=64)
    assert rate(mild.optimize("sgd", lr=2.048, scale_lr=True)) == pytest.approx(0.064)
    result = scaled.optimize("sgd", lr=0.1, base_batch_size=128, scale_lr=True, schedule="constant").fit(
        epochs=1, progress=False
    )
    assert result.history.epochs[0].lr == pytest.approx(0.025)
    assert math.isfinite(result.history.epochs[0].loss)
    wild = pipeline.optimize("sgd", lr=4e30, base_batch_size=128, scale_lr=True)
    with pytest.raises(NonFiniteError, match=r"Lower the learning rate \(sgd \(lr=1e\+30\)"):
        wild.fit(epochs=1, progress=False)


def test_what_cannot_be_scaled(toy: Toy) -> None:
    pipeline = toy.pipeline(plain_model)
    with pytest.raises(PlanError, match="Pass base_batch_size=…"):
        pipeline.optimize("sgd", lr=0.1, scale_lr=True)
    with pytest.raises(PlanError, match="base_batch_size=0 must be a positive integer"):
        pipeline.optimize("sgd", lr=0.1, base_batch_size=0)
    with pytest.raises(PlanError, match=r"scale_lr=256 must be True or False; .*is base_batch_size"):
        pipeline.optimize("sgd", lr=0.1, scale_lr=256)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="needs an optimizer by name"):
        pipeline.optimize(lambda _: None, scale_lr=True, base_batch_size=8)  # type: ignore[arg-type, return-value]
    for overrides, message in (
        ({"scale_lr": "linear"}, "scale_lr='linear' must be true or false"),
        ({"base_batch_size": 0}, "base_batch_size=0 must be"),
        ({"optimizer.scale_lr": True}, "optimizer.scale_lr is a key of the recipe itself. Set scale_lr=…"),
    ):
        with pytest.raises(RecipeError, match=message):
            recipe("resnet50-mild", **overrides)


@pytest.mark.parametrize("set_by", ["itself", "the optimizer"])
def test_a_torch_scheduler_is_scaled(toy: Toy, set_by: str) -> None:
    """One that sets the learning rates itself, too: every rate of the run is four times as high."""
    given = own_schedules.one_cycle if set_by == "itself" else own_schedules.steps
    pipeline = toy.pipeline().optimize("sgd", lr=0.02, schedule=given)
    scaled = pipeline.optimize("sgd", lr=0.02, schedule=given, scale_lr=True, base_batch_size=8)
    rates = [epoch.lr for epoch in pipeline.fit(epochs=2, progress=False).history.epochs]
    found = [epoch.lr for epoch in scaled.fit(epochs=2, progress=False).history.epochs]
    assert found == pytest.approx([4 * rate for rate in rates], rel=1e-12)
    assert "each is multiplied by 4 for 32 (linear, scale_lr)" in row(scaled).why
    with scaled.build() as built:
        assert built.begin(2).set_lr(7) == pytest.approx(4 * rates[-1])
    assert "scaled to" not in str(scaled.plan())


def test_the_weight_decay_of_sgdw_belongs_to_the_scaled_peak(toy: Toy) -> None:
    """There a weight loses its full share, and no more, also if the scheduler's rates are scaled."""
    options: dict[str, Any] = {"lr": 0.02, "schedule": own_schedules.steps, "scale_lr": True, "base_batch_size": 8}
    with toy.pipeline().optimize("sgdw", **options).build() as built:
        rate = built.begin(2).set_lr(0)
        (group,) = built.engine.optimizer.param_groups
    assert (rate, group["peak_lr"]) == pytest.approx((0.08, 0.08))


def test_a_class_its_dotted_name_and_its_name_are_the_same() -> None:
    for given in ("adam", torch.optim.Adam, "torch.optim:Adam"):
        config = OptimizerConfig(given, {"lr": 0.01})
        assert config.optimizer == "adam"
        assert type(config.factory([nn.Parameter(torch.zeros(1))])) is torch.optim.Adam
    by_class, by_name = (OptimizerConfig(o, {"lr": 0.01}) for o in (torch.optim.NAdam, "torch.optim:NAdam"))
    assert by_class == by_name
    assert by_class.describe() == "NAdam (lr=0.01), cosine schedule"


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("nadam", {}, "No optimizer is named 'nadam'. Write others as package.module:Class, .*Did you mean 'adam'"),
        ("torch.optim:NAdm", {}, "'torch.optim:NAdm' cannot be imported"),
        (torch.optim.NAdam, {"beta": 0.1}, r"optimize\(NAdam\) has no option 'beta'.*Did you mean 'betas'"),
        (torch.optim.NAdam, {"betas": 0.9}, r"optimize\(NAdam\): betas=0.9 must be 2 numbers"),
        (torch.optim.RMSprop, {"alpha": float("nan")}, "alpha=nan must be finite"),
        (torch.optim.RMSprop, {"fused": 3, "foreach": True}, "has no option 'fused'"),
        (torch.optim.RMSprop, {"foreach": 3}, "foreach=3 must be True, False or None"),
        (torch.optim.LBFGS, {}, "LBFGS computes the loss several times per step"),
        (torch.optim.SparseAdam, {}, "SparseAdam needs sparse gradients"),
        (torch.optim.Muon, {}, "Muon. cannot use .*2D parameters.*Use 'muon'"),
        (nn.Linear, {}, "the class Linear, which is not a torch.optim.Optimizer"),
        (3, {}, "the name of an optimizer, a class or a function, not 3"),
    ],
)  # fmt: skip
def test_what_is_refused(optimizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Pipeline(nn.Identity).optimize(optimizer, **options)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_what_a_function_returns_is_refused_alike(kind: Any, toy: Toy) -> None:
    """The first step would end with an error of torch's."""
    with pytest.raises(PlanError, match=f"{kind.__name__} (computes the loss several times|needs sparse gradients)"):
        toy.pipeline().optimize(lambda parameters: kind(parameters, lr=0.1)).build()


@pytest.mark.parametrize(
    ("optimizer", "rule"), [("sgd", "linear"), ("adam", "square root"), (torch.optim.RAdam, "square root")]
)
def test_scaling_rules(optimizer: Any, rule: str) -> None:
    config = OptimizerConfig(optimizer, {"lr": 0.1}, base_batch_size=64, scale_lr=True)
    assert config.scaling == rule
    assert config.at(256).options["lr"] == pytest.approx({"linear": 0.4, "square root": 0.2}[rule])


def test_no_scaling_rule(toy: Toy) -> None:
    with pytest.raises(PlanError, match=r"no rule is known for how the learning rate of Adagrad depends.*RMSprop"):
        OptimizerConfig(torch.optim.Adagrad, base_batch_size=64, scale_lr=True, options={"lr": 0.1})
    pipeline = toy.pipeline().optimize(torch.optim.Adagrad, lr=0.1, base_batch_size=64)
    assert row(pipeline).caution == "the learning rate is for batches of 64 images, not 32"
    factory = toy.pipeline().optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1), base_batch_size=64)
    assert row(factory).caution == "the learning rate is for batches of 64 images, not 32"
    assert OptimizerConfig(torch.optim.Adagrad, {}).lr == 0.01


def test_in_recipes(toy: Toy) -> None:
    pipeline = toy.pipeline(nn.Identity).optimize(torch.optim.NAdam, lr=0.01, betas=(0.8, 0.9))
    recipe = pipeline.to_recipe()
    assert recipe["optimizer"] == {"name": "torch.optim:NAdam", "lr": 0.01, "betas": [0.8, 0.9]}
    assert Pipeline.from_recipe(recipe) == pipeline
    assert ".optimize(NAdam, lr=0.01, betas=(0.8, 0.9))" in repr(pipeline)
    with pytest.raises(RecipeError, match="Python's standard library"):
        Pipeline.from_recipe(recipe, **{"optimizer.name": "shutil:rmtree"})


@pytest.mark.parametrize(
    "name", ["Adafactor", *(pytest.param(name, marks=pytest.mark.slow) for name in ("NAdam", "Rprop"))]
)
def test_any_class_trains_and_resumes(name: str, toy: Toy, tmp_path: Any) -> None:
    pipeline = toy.pipeline().optimize(getattr(torch.optim, name), lr=0.01, schedule="constant")
    assert_resumes(pipeline, tmp_path)
