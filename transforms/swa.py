"""SWA: the mean of the weights over the last part of training."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..common.errors import PlanError
from .base import FractionAboveZero, FractionBelowOne, Positive, Session, Transform
from .common.averaging import Averages, averaged_names, refuse_partitioned


@dataclass(frozen=True)
class SWA(Transform):
    """Average the weights between two points of training; at the second, the mean becomes the model's weights.

    BatchNorm's running statistics are averaged with the weights, so they belong to the averaged part (Composer uses
    those from its start). This approximates the statistics of the mean weights. Training after `end` adapts them; if
    there is none, `torch.optim.swa_utils.update_bn(loader, model)` after `finish()` computes them.

    Between the two points, evaluation uses the mean so far. Half precision is averaged in float32. Memory: one more
    copy of the model from `start` to `end`. Not supported with DeepSpeed, which steps a copy of the weights that the
    mean does not reach, and whose stage 3 partitions the parameters.

    Attributes:
        start: fraction of training after which it begins. Number in [0, 1). Default 0.7, as in Composer.
        end: fraction at which the mean is installed; above `start`. Number in (0, 1]. Default 0.97, as in Composer.
        update_every: optimizer steps between two averaged weights. Integer ≥ 1. Default 1: the paper and Composer
            average once per epoch, which a step does not know; more points on the same path give a finer mean.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima", 2018, arXiv:1803.05407.

    Example::

        >>> pipeline = pipeline.transform(SWA(start=0.7, end=0.97))
    """

    start: FractionBelowOne = 0.7
    end: FractionAboveZero = 0.97
    update_every: Positive = 1

    kind = "loop"
    source = "Izmailov et al. 2018, arXiv:1803.05407"
    unsafe_with = ("deepspeed",)
    averages_weights = True
    depends_on_length = True  # it begins and ends at fractions of training

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end <= self.start:
            raise PlanError(
                f"SWA(start={self.start}, end={self.end}) covers no part of the training. Set end above start."
            )

    def session(self, model: nn.Module) -> Session:
        return SWASession(self, model)


class SWASession(Session):
    def __init__(self, options: SWA, model: nn.Module) -> None:
        refuse_partitioned(model)
        self._options, self._model = options, model
        self._averaged = averaged_names(model)  # computed here, so that no step has to synchronize
        self._mean: Averages | None = None  # set from the first averaged weights until they are installed
        self._counted = 0
        self._steps = 0  # since `start`
        self._ended = False

    def after_step(self, progress: float) -> None:
        if self._ended or progress < self._options.start:
            return
        if self._steps % self._options.update_every == 0:
            self._count()
        self._steps += 1
        # Slightly less than `end`, which a progress of k/n may miss by the last bit.
        if progress > self._options.end - 1e-9:
            self._end()

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext() if self._mean is None else self._mean.installed()

    def finish(self) -> None:
        if not self._counted:
            warnings.warn(
                f"{self._options} averaged nothing: no step came after start. Train for more steps or lower start.",
                stacklevel=2,
            )
        self._end()

    def state_dict(self) -> dict[str, Any]:
        mean = {} if self._mean is None else self._mean.state_dict()
        return {"steps": self._steps, "counted": self._counted, "ended": self._ended, "mean": mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean = None
        if state["mean"]:
            self._mean = Averages(self._model, self._averaged)
            self._mean.load_state_dict(state["mean"])
        self._steps, self._counted, self._ended = state["steps"], state["counted"], state["ended"]

    def _count(self) -> None:
        if self._mean is None:
            self._mean = Averages(self._model, self._averaged)
        else:
            self._mean.add(1 / (self._counted + 1))
        self._counted += 1

    def _end(self) -> None:
        if self._mean is not None:
            self._mean.install()
        self._mean, self._ended = None, True
