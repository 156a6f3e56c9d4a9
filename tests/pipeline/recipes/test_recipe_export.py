"""Pipelines as recipes and back: the result is equal, or an error names what a recipe cannot express."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recipe_factories
import torch
import torchvision
from drivetrain import RECIPES, Pipeline, RecipeError, strategies
from drivetrain.pipeline.describe.plan import Plan
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.strategies.registry import STRATEGIES
from drivetrain.transforms import EMA, BlurPool, LabelSmoothing, RandAugment
from pipeline_data import plain_model

CPU = {"strategy_options.device": "cpu"}


def assert_equal(one: Pipeline, other: Pipeline) -> None:
    """Every field is the same, and so is the plan."""
    for field in dataclasses.fields(Pipeline):
        assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert one == other
    assert (
        Plan(resolve(one, files=False).steps).to_dict() == Plan(resolve(other, files=False).steps).to_dict()
    )


def round_trip(pipeline: Pipeline) -> dict[str, Any]:
    recipe = pipeline.to_recipe()
    assert json.loads(json.dumps(recipe, allow_nan=False)) == recipe
    assert Pipeline.from_recipe(recipe).to_recipe() == recipe
    return recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_comes_back(name: str) -> None:
    if RECIPES[name].get("strategy", "single") not in STRATEGIES:
        pytest.skip(f"unknown strategy {RECIPES[name]['strategy']}")
    pipeline = Pipeline.from_recipe(name, **CPU)
    assert_equal(Pipeline.from_recipe(round_trip(pipeline)), pipeline)


def start(model: Any = recipe_factories.small, **options: Any) -> Pipeline:
    return Pipeline(model, **options).load("train.beton", batch_size=8, image_size=16)


PIPELINES: dict[str, Callable[[], Pipeline]] = {
    "least": start,
    "all stages": lambda: (
        Pipeline(torchvision.models.resnet18, seed=3, num_classes=4)
        .load(
            "a.beton", "b.beton", batch_size=8, image_size=16, eval_image_size=32, loader="torch", workers=0,
            mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), flip=False, scale=(0.5, 1.0),
        )
        .transform(LabelSmoothing(0.2), BlurPool(min_channels=8), EMA(None, 0.9), RandAugment(1, 4))
        .optimize("adamw", lr=1e-3, betas=(0.9, 0.95), schedule="linear", warmup=0.5)
        .distribute("ddp", devices=2, precision="bf16", accumulate=2, clip_norm=1, device="cpu", compile="default",
                    activation_checkpointing=["BasicBlock"])
    ),
    "asked for what is the default": lambda: start().optimize("sgd", lr=0.1, momentum=0.9).distribute("single"),
    "a class": lambda: start(recipe_factories.Small, classes=4),
    "a class in a class": lambda: start(recipe_factories.Small.Inner),
    "own by name": lambda: start("cifar_resnet", num_classes=4),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_comes_back(name: str) -> None:
    pipeline = PIPELINES[name]()
    recipe = round_trip(pipeline)
    assert_equal(Pipeline.from_recipe(recipe), pipeline)
    assert ("optimizer" in recipe) == (pipeline.optimization is not None)
    assert ("strategy" in recipe) == (pipeline.distribution is not None)


def test_models_have_the_names_that_people_know() -> None:
    for model, name in {
        torchvision.models.resnet18: "resnet18",
        "resnet18": "resnet18",
        recipe_factories.small: "recipe_factories:small",
        recipe_factories.Small.Inner: "recipe_factories:Small.Inner",
        "vit_s16": "vit_s16",
    }.items():
        assert start(model).to_recipe()["model"] == name
    weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    recipe = start(torchvision.models.resnet18, weights=weights).to_recipe()
    assert recipe["model_options"] == {"weights": "IMAGENET1K_V1"}


def test_a_strategy_object_goes_by_its_name() -> None:
    recipe = round_trip(start().distribute(strategies.get("ddp", device="cpu", find_unused_parameters=True)))
    assert recipe["strategy"] == "ddp"
    assert recipe["strategy_options"] == {"device": "cpu", "find_unused_parameters": True}


@dataclasses.dataclass(frozen=True)
class OwnStrategy:
    name = "mine"
    summary = "a strategy that no registry knows"

    def check(self, devices: int) -> None: ...

    def prepare(self, *_: Any, **__: Any) -> Any: ...


def own_transform() -> LabelSmoothing:
    @dataclasses.dataclass(frozen=True)
    class OwnTransform(LabelSmoothing):
        pass

    return OwnTransform()


IMPOSSIBLE: dict[str, tuple[Callable[[], Pipeline], str]] = {
    "no data": (lambda: Pipeline("resnet18"), "has no data.*Add .load"),
    "module": (lambda: start(plain_model()), "a Sequential that is already built.*factory"),
    "lambda": (lambda: start(lambda: plain_model()), "cannot be imported by name.*package.module:factory"),
    "lambda of a module": (lambda: start(recipe_factories.anonymous), "cannot be imported by name"),
    "made inside": (lambda: start(recipe_factories.made_inside()), "cannot be imported by name"),
    "model's option": (
        lambda: start(norm_layer=torch.nn.BatchNorm2d),
        "model_options.norm_layer is .*a type",
    ),
    "option inside": (lambda: start(sizes=[1, {2}]), r"model_options.sizes\[1\] is \{2\}, a set"),
    "not finite": (lambda: start(scale=float("inf")), "model_options.scale is inf"),
    "transform": (lambda: start().transform(own_transform()), "cannot be imported by name"),
    "optimizer": (
        lambda: start().optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        "which a recipe cannot name. Pass .optimize.. the name",
    ),
    "optimizer's option": (
        lambda: start().optimize("sgd", lr=torch.tensor(0.1)),
        "optimizer.lr is tensor.*which a recipe cannot contain",
    ),
    "strategy": (lambda: start().distribute(OwnStrategy()), r"cannot create the strategy OwnStrategy\(\)"),
    "policy": (
        lambda: start().distribute("single", activation_checkpointing=lambda name, _: name == "0"),
        "activation_checkpointing=…. is a function",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_recipe_can_hold(name: str) -> None:
    make, message = IMPOSSIBLE[name]
    pipeline = make()
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        pipeline.to_recipe()


OWN_NET = "from torch import nn\n\n\nclass Net(nn.Identity):\n    pass\n"
SCRIPT = """
import net
from drivetrain import Pipeline, RecipeError

for factory in (Net, net.Net):
    try:
        print(Pipeline(factory).load("train.beton", batch_size=8, image_size=16).to_recipe()["model"])
    except RecipeError as error:
        print(error)
"""


@pytest.mark.process
@pytest.mark.long
def test_a_factory_of_the_running_script(tmp_path: Path) -> None:
    """The error names the remedy, and the remedy is one."""
    (tmp_path / "net.py").write_text(OWN_NET)
    (tmp_path / "train.py").write_text(OWN_NET + SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    error, name = done.stdout.splitlines()
    assert error.startswith("The model's factory Net is defined in the script or notebook that is running")
    assert error.endswith(
        "such as net.py, and write from net import Net; its name in a recipe is then net:Net."
    )
    assert name == "net:Net"
