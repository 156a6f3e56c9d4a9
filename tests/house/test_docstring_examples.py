"""Every public name has an example in its docstring, and each example runs as printed.

The examples find a small data set in the current folder and a few names that are not theirs: see `names`.
"""

import copy
import doctest
import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from drivetrain import Pipeline, strategies
from drivetrain.loaders import convert
from drivetrain.pipeline import FitResult, Ledger
from drivetrain.pipeline.ledger.variant import LOADER, MODEL, PLAIN, Trial, in_turn
from loader_pictures import jpeg_bytes, picture
from places import ROOT
from torch import nn

sys.path.insert(0, str(ROOT / "docs"))
from public_names import PACKAGES, public_names

WITHOUT = {
    "drivetrain.Pipeline.ledger": "measures for seconds; docs/ledger.md and a notebook have examples",
    "drivetrain.Pipeline.tune": "measures for seconds; docs/tuning.md has an example",
    "drivetrain.loaders.Advice": "measures for seconds; printed in docs/data.md",
    "drivetrain.loaders.advise": "measures for seconds; docs/data.md has a command line",
    "drivetrain.loaders.StockFFCVLoader": "compiles for seconds; arguments and batches are FFCVLoader's",
    "drivetrain.pipeline.Tuned": "measures for seconds; docs/tuning.md has an example",
    "drivetrain.strategies.FairScaleFSDP": "only raises an error",
    "drivetrain.strategies.OptimizerState": "what engines and checkpoints exchange, not for users to create",
    "drivetrain.strategies.PrepareOptions": "the types of keyword arguments, for type checkers",
    "drivetrain.strategies.launch": "starts processes; docs/strategies.md and its tests have examples",
    "drivetrain.transforms.from_composer": "imports Composer; docs/guide/composer.md has examples",
}
"""Public classes, functions and methods of a Pipeline without an example, and why."""


def public() -> dict[str, Any]:
    """Return the public classes and functions, without exceptions, by the first package that has them."""
    found: dict[int, tuple[str, Any]] = {}
    for package in PACKAGES:
        for name in public_names(package):
            value = getattr(importlib.import_module(package), name)
            failure = isinstance(value, type) and issubclass(value, BaseException)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not failure:
                found.setdefault(id(value), (f"{package}.{name}", value))
    return dict(found.values())


PUBLIC = public() | {
    f"{name}.{method}": function
    for name, described in (("drivetrain.Pipeline", Pipeline), ("drivetrain.pipeline.FitResult", FitResult))
    for method, function in inspect.getmembers(described, callable)
    if not method.startswith("_")
}
EXAMPLES = {name: value for name, value in PUBLIC.items() if name not in WITHOUT}


@dataclass(frozen=True)
class World:
    """What examples use: a folder with data, and models."""

    folder: Path
    pipeline: Pipeline
    result: Any
    model: nn.Module
    vit: nn.Module

    def names(self, package: str, code: str) -> dict[str, Any]:
        """Return names as if they had been imported or made before: those of the packages, a ResNet-18, a small vision
        transformer, a batch, and a pipeline with its result. Of models only those in the code: copies take long."""
        found: dict[str, Any] = {}
        for each in (*PACKAGES, package):
            module = importlib.import_module(each)
            found |= {name: getattr(module, name) for name in public_names(each)}
        images = torch.linspace(0.5, 1, 8 * 3 * 32 * 32).reshape(8, 3, 32, 32)
        models = {"model": self.model, "vit": self.vit}
        return found | {
            "torch": torch, "nn": nn, "dataclass": dataclass, "strategies": strategies,
            "images": images, "labels": torch.arange(8) % 2, "pipeline": self.pipeline, "result": self.result,
        } | {name: copy.deepcopy(model) for name, model in models.items() if name in code}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("examples")
    for number in range(4):
        path = folder / "photos" / ("cat", "dog")[number % 2] / f"{number // 2}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg_bytes(picture(number, 40, 50)))
    for name, count in (("train", 32), ("val", 16)):
        images = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        labeled = images, np.arange(count) % 2
        convert(labeled, folder / f"{name}.beton", classes=["cat", "dog"], progress=False)
    for name, faster in (("before", 2.0), ("after", 2.5)):
        speeds = {PLAIN: 400.0, in_turn("FFCV loader"): 400 * faster, LOADER: 4000.0, MODEL: 900.0}
        rounds = [{one: Trial(1200, 1200 / speed, 0.0) for one, speed in speeds.items()}] * 3
        Ledger(rounds, {"recipe": None}).save(folder / f"{name}.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pipeline = Pipeline("cifar_resnet", num_classes=2, width=4).optimize("sgd", lr=0.1)
        pipeline = pipeline.load("train.beton", "val.beton", batch_size=16, image_size=32, workers=1)
        result = pipeline.fit(epochs=1, out="runs/photos", progress=False)
    torch.manual_seed(0)
    vit = torchvision.models.VisionTransformer(32, 8, 2, 2, 64, 128, num_classes=2)
    return World(folder, pipeline, result, torchvision.models.resnet18(num_classes=2), vit)


pytestmark = pytest.mark.usefixtures("nothing_registered")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_printed(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.folder)
    text, parser = inspect.getdoc(EXAMPLES[name]) or "", doctest.DocTestParser()
    code = "".join(example.source for example in parser.get_examples(text))
    names = world.names(next(each for each in reversed(PACKAGES) if name.startswith(f"{each}.")), code)
    test = parser.get_doctest(text, names, name, None, None)
    assert test.examples, f"{name} has no example in its docstring"
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(test, out=told.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(told)


def test_what_has_no_example_is_public_and_has_none() -> None:
    for name in WITHOUT:
        assert ">>>" not in (inspect.getdoc(PUBLIC[name]) or ""), name


def test_an_example_that_is_wrong_fails() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner().run(test, out=lambda _: None).failed == 1
