"""SWA: the plain mean of the weights along the last part of a training."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..errors import PlanError
from .base import Kind, Session, Transform
from .common.averaging import Averages, averaged_names, refuse_partitioned
from .common.checks import check_count, check_range


@dataclass(frozen=True)
class SWA(Transform):
    """Averages the weights between two points of a training; at the second the model takes the mean over.

    BatchNorm's running statistics are averaged with the weights, so they are never those of another point
    of the training (Composer takes them from the start of the averaging). That is an approximation: the
    exact ones belong to the mean weights. The training that remains after `end` adapts them; where none
    remains, `torch.optim.swa_utils.update_bn(loader, model)` after `finish()` measures them.

    Between the two points an evaluation sees the mean so far. Half precision is averaged in float32. From
    `start` to `end` it costs the model's memory once more. DeepSpeed steps a copy of the weights that the mean does not
    reach, and its stage 3 leaves nothing on the model to average.

    Attributes:
        start: share of the training after which it begins. Number in [0, 1). Default 0.7, as in Composer.
        end: share of the training at which the model becomes the mean; above `start`. Number in (0, 1].
            Default 0.97, as in Composer.
        update_every: optimizer steps from one weight that counts to the next. Whole number ≥ 1. Default 1:
            the source and Composer take one per epoch, which a step knows nothing of, and more weights
            of the same path make the same mean more finely.

    Raises:
        PlanError: at construction, if a value is out of range; by `session`, if DeepSpeed's stage 3 has
            divided the parameters.

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", 2018,
    arXiv:1803.05407.
    """

    start: float = 0.7
    end: float = 0.97
    update_every: int = 1

    kind: ClassVar[Kind] = "loop"
    source: ClassVar[str] = "Izmailov et al. 2018, arXiv:1803.05407"
    unsafe_with: ClassVar[tuple[str, ...]] = ("deepspeed",)

    def __post_init__(self) -> None:
        check_range(self, "start", "[0, 1)")
        check_range(self, "end", "(0, 1]")
        check_count(self, "update_every", 1)
        if self.end <= self.start:
            raise PlanError(
                f"SWA(start={self.start}, end={self.end}): nothing lies between; give an end above the start."
            )

    @property
    def depends_on_length(self) -> bool:
        """Yes: it begins and ends at shares of the training."""
        return True

    def session(self, model: nn.Module) -> Session:
        """Begins to follow `model`, which is on its device, sharded and loaded."""
        return SWASession(self, model)


class SWASession(Session):
    """The mean of one training."""

    def __init__(self, options: SWA, model: nn.Module) -> None:
        refuse_partitioned(model)
        self._options = options
        self._model = model
        self._averaged = averaged_names(model)  # now, because the first step that counts must not wait for it
        self._mean: Averages | None = None  # there from the first weights that count until it is installed
        self._counted = 0
        self._steps = 0  # since `start`
        self._ended = False

    def after_step(self, progress: float) -> None:
        """Counts the weights where they are due; at `end` writes the mean into the model."""
        if self._ended or progress < self._options.start:
            return
        if self._steps % self._options.update_every == 0:
            self._count()
        self._steps += 1
        # A little less than the end, which a progress of k/n may miss by the last bit.
        if progress > self._options.end - 1e-9:
            self._end()

    def evaluating(self) -> AbstractContextManager[None]:
        """The model has the mean so far inside it, if there is one that it has not taken over yet."""
        return nullcontext() if self._mean is None else self._mean.installed()

    def finish(self) -> None:
        """The model keeps the mean, if it has not taken it over at `end`.

        Warns if no step fell between `start` and `end`: the model is then as it was trained.
        """
        if not self._counted:
            warnings.warn(
                f"{self._options} averaged nothing: no step came after start; "
                "train for more steps or start earlier.",
                UserWarning,
                stacklevel=2,
            )
        self._end()

    def state_dict(self) -> dict[str, Any]:
        """`{"steps", "counted": int, "ended": bool, "mean": {name: tensor}}`, the mean empty where none is."""
        mean = {} if self._mean is None else self._mean.state_dict()
        return {"steps": self._steps, "counted": self._counted, "ended": self._ended, "mean": mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave, of the same model."""
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


__all__ = ["SWA", "SWASession"]
