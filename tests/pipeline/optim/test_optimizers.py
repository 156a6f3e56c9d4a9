"""Optimizers by name, class and dotted name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drivetrain import Pipeline, PlanError, RecipeError
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.optim.config import OptimizerConfig
from pipeline_data import Toy, numbers
from torch import nn


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
        (
            "nadam",
            {},
            "No optimizer is named 'nadam'. Write others as package.module:Class, .*Did you mean 'adam'",
        ),
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
)
def test_what_is_refused(optimizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Pipeline(nn.Identity).optimize(optimizer, **options)


@pytest.mark.parametrize(
    ("optimizer", "rule"), [("sgd", "linear"), ("adam", "square root"), (torch.optim.RAdam, "square root")]
)
def test_scaling_rules(optimizer: Any, rule: str) -> None:
    config = OptimizerConfig(optimizer, {"lr": 0.1}, base_batch_size=64, scale_lr=True)
    assert config.scaling == rule
    assert config.at(256).options["lr"] == pytest.approx({"linear": 0.4, "square root": 0.2}[rule])


def test_no_scaling_rule(toy: Toy) -> None:
    with pytest.raises(
        PlanError, match=r"no rule is known for how the learning rate of Adagrad depends.*RMSprop"
    ):
        OptimizerConfig(torch.optim.Adagrad, base_batch_size=64, scale_lr=True, options={"lr": 0.1})
    pipeline = toy.pipeline().optimize(torch.optim.Adagrad, lr=0.1, base_batch_size=64)
    (row,) = (step for step in resolve(pipeline, files=False).steps if step.what.startswith("optimizer"))
    assert "caution: the learning rate is for batches of 64 images, not 32" in row.why
    assert OptimizerConfig(torch.optim.Adagrad, {}).lr == 0.01


def test_in_recipes(toy: Toy) -> None:
    pipeline = toy.pipeline(nn.Identity).optimize(torch.optim.NAdam, lr=0.01, betas=(0.8, 0.9))
    recipe = pipeline.to_recipe()
    assert recipe["optimizer"] == {"name": "torch.optim:NAdam", "lr": 0.01, "betas": [0.8, 0.9]}
    assert Pipeline.from_recipe(recipe) == pipeline
    assert ".optimize(NAdam, lr=0.01, betas=(0.8, 0.9))" in repr(pipeline)
    with pytest.raises(RecipeError, match="Python's standard library"):
        Pipeline.from_recipe(recipe, **{"optimizer.name": "shutil:rmtree"})


def test_any_class_trains_and_resumes(toy: Toy, tmp_path: Any) -> None:
    for kind in (torch.optim.NAdam, torch.optim.Adafactor, torch.optim.Rprop):
        pipeline = toy.pipeline().optimize(kind, lr=0.01, schedule="constant")
        whole = pipeline.fit(epochs=2, progress=False)
        pipeline.fit(epochs=1, progress=False, out=tmp_path / kind.__name__)
        again = pipeline.fit(epochs=2, progress=False, out=tmp_path / kind.__name__, resume="auto")
        assert numbers(again) == numbers(whole)
        for name, value in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], value)
