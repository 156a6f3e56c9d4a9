"""What ranks do in the tests of clusters. A module, because ranks import it."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

import torch.distributed as dist
from drivetrain import Callback, DrivetrainError, Pipeline, RunView
from drivetrain.pipeline.runs.artifacts import FitJob
from drivetrain.pipeline.runs.preflight import preflight
from drivetrain.pipeline.spec.resolve import resolve


class Signals(Callback):
    """Sends a signal to its own process after step `step`, on rank `rank`."""

    def __init__(self, step: int, rank: int = 0, name: str = "SIGUSR1") -> None:
        self.step, self.rank, self.name = step, rank, name

    def on_step_end(self, view: RunView) -> None:
        if view.step == self.step and view.rank == self.rank:
            os.kill(os.getpid(), signal.Signals[self.name])


class Slow(Callback):
    """Gives a signal time to arrive."""

    def on_step_end(self, view: RunView) -> None:  # noqa: ARG002
        time.sleep(0.1)


Case = tuple[Pipeline, Pipeline, dict[str, Any], dict[str, Any]]
"""The pipelines of ranks 0 and 1, and their options of `fit`."""


def compare_before_training(cases: dict[str, Case]) -> dict[str, str]:
    """On each rank: what `preflight` says of each case."""
    rank, said = dist.get_rank(), {}
    for name, case in cases.items():
        job = FitJob(**{"epochs": 1} | case[2 + rank])
        try:
            preflight(dataclasses.replace(resolve(case[rank])), job)
        except DrivetrainError as error:
            said[name] = str(error)
        else:
            said[name] = ""
    return said
