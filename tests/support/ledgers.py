"""Ledgers that are made up from images/s, and pipelines that are built for trials."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
from drivetrain import Pipeline
from drivetrain.common.budget import Budget
from drivetrain.pipeline import Ledger
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.ledger.variant import LOADER, MODEL, PLAIN, Trial, VariantId, in_turn
from drivetrain.pipeline.measuring.ledger import Record, _Measurement
from drivetrain.pipeline.measuring.runner import Loaders, build_variant
from drivetrain.pipeline.measuring.trials import BuiltVariant
from pipeline_data import CLASSES, Toy, plain_model
from torch import nn

TRAIN, BATCH = 32, 8


class FewImages(Toy):
    """A quarter of the toy's training images in batches of a quarter: an epoch is as many steps, and trials in this
    process, whose loader decodes one image after the other, take a quarter of the time."""

    samples = TRAIN

    def pipeline(self, model: Any = None, **load: Any) -> Pipeline:
        return super().pipeline(model, **{"batch_size": BATCH} | load)


HIGH = {LOADER: 1e6, MODEL: 1e6}
"""Ceilings that nothing reaches."""


def trials_of(speeds: Mapping[VariantId, float], waited: float = 0.0) -> dict[VariantId, Trial]:
    """A round in which each variant took 1,000 images at this speed, and waited for this share of the time."""
    return {one: Trial(1000, 1000 / speed, waited * 1000 / speed) for one, speed in speeds.items()}


def of_speeds(*rounds: dict[VariantId, float], facts: dict[str, Any] | None = None, **fields: Any) -> Ledger:
    """A ledger from images/s, with ceilings that nothing reaches where none are given."""
    return Ledger([trials_of(one | HIGH | one) for one in rounds], {"recipe": None} | (facts or {}), **fields)


WHOLE = in_turn("FFCV loader")


def made_up(*, model: float = 900, loader: float = 4000) -> Ledger:
    """Three rounds on a machine that gets slower; the FFCV loader is 2, 2.5 and 3 times as fast."""
    rounds = []
    for speed, faster in ((400, 2), (200, 2.5), (100, 3)):
        speeds = {PLAIN: speed, WHOLE: speed * faster, LOADER: loader, MODEL: model}
        rounds.append({one: Trial(1200, 1200 / each, 300 / each) for one, each in speeds.items()})
    return Ledger(rounds, {"recipe": "made <up>"})


def in_process(toy: Toy, model: Any = plain_model, **load: Any) -> Pipeline:
    """A pipeline that starts no processes: with the torch loader's workers=0."""
    return toy.pipeline(model, **{"loader": "torch", "workers": 0, **load})


@contextmanager
def built(pipeline: Pipeline) -> Iterator[BuiltVariant]:
    with ExitStack() as stack:
        yield build_variant(resolve(pipeline), Loaders(stack), stack)[0]


def measurement_of(pipeline: Pipeline, *variants: VariantId) -> _Measurement:
    """A measurement of these variants that has begun with nothing."""
    budget = Budget(99, perf_counter(), progress=False, label="ledger")
    return _Measurement(resolve(pipeline), Record([*variants]), budget, 0.1)


def small_recipe(path: Path, more: str = "") -> Path:
    """A recipe that trains a small ResNet on the toy data, in this process."""
    path.write_text(
        f"model: cifar_resnet\nmodel_options: {{num_classes: {CLASSES}, width: 4}}\nloader: torch\nworkers: 0\n"
        f"batch_size: {BATCH}\nimage_size: 16\noptimizer: {{name: sgd, lr: 1e-3}}\nepochs: 9\n{more}"
    )
    return path


class Acting(nn.Module):
    """A small model that calls `act` in each forward of a whole training batch; it notes all that are alive."""

    alive: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.forwards = plain_model(), 0
        self.alive.add(self)

    def act(self, images: torch.Tensor) -> None:
        """For subclasses."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and len(images) == BATCH:
            self.forwards += 1
            self.act(images)
        return self.layers(images)
