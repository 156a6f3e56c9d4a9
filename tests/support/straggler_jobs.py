"""Trainings in which one rank is slow, for the tests of stragglers. A module, because ranks import it."""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from drivetrain import Callback, Pipeline, RunView
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline.telemetry.rank_times import StragglerWarning
from pipeline_data import Sleepy

USUAL, SLOW = 0.01, 0.05  # seconds per step: of each rank's forward, and of the slow one in addition


class SlowCallback(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, view: RunView) -> None:
        time.sleep(SLOW * (view.rank == self.rank))


class HangingCallback(Callback):
    def on_step_end(self, view: RunView) -> None:
        if view.rank and view.step == 2:
            time.sleep(600)


class HangingForward(Sleepy):
    """A model whose second step does not end on rank 1."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seconds += self.training and dist.is_initialized() and len(images) > 2  # two images try it before
        if self.seconds == 2 and dist.get_rank() == 1:
            time.sleep(600)
        return self.layers(images)


class SlowForward(Sleepy):
    """A model whose training takes longer on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(USUAL)
        self.rank = rank

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW * (self.training and dist.is_initialized() and dist.get_rank() == self.rank))
        return super().forward(images)


def train(cases: dict[str, Pipeline], slow: int, out: Path) -> dict[str, Any]:
    """On each rank: the stragglers of each case's history, and what it has warned of. The name of a case says what is
    slow on rank `slow`: its data, its callbacks, or nothing but the model. At the end of the third interval, in the
    second epoch, a straggler is named; at that of the fourth, in the third epoch, it is not named again."""
    torch.set_num_threads(1)
    found = {}
    for name, pipeline in cases.items():
        callbacks = [SlowCallback(slow)] if "callback" in name else []
        iterate = FFCVLoader.__iter__

        def slowly(loader: FFCVLoader, iterate: Any = iterate, name: str = name) -> Iterator[Any]:
            for batch in iterate(loader):
                time.sleep(SLOW * ("data" in name and dist.get_rank() == slow))
                yield batch

        with (
            warnings.catch_warnings(record=True) as caught,
            mock.patch.object(FFCVLoader, "__iter__", slowly),
        ):
            warnings.simplefilter("always")
            result = pipeline.fit(
                epochs=3 if "data" in name else 2, out=out / name, logger=["csv", "prometheus"], log_every=5,
                callbacks=callbacks, checkpoints=None, progress=False,
            )  # fmt: skip
        told = [str(one.message) for one in caught if one.category is StragglerWarning]
        found[name] = result.history.facts.get("stragglers", []), told
    return found
