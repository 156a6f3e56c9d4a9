"""Lookahead: every few steps the weights go back, part of the way, to where they were."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from .averaging import Averages
from .base import Kind, Session, Transform
from .checks import check_count, check_range


@dataclass(frozen=True)
class Lookahead(Transform):
    """Every `interval` steps slow = stays · slow + (1 - stays) · weight, and the weights become slow.

    Evaluation and the end of the training have the slow weights. Buffers such as BatchNorm's running statistics
    go with the weights. The optimizer's state (momentum) stays as it is. Costs the model's memory once more.

    DeepSpeed computes with copies of weights that only its optimizer writes, which would undo it.

    Attributes:
        interval: optimizer steps between two updates. Whole number ≥ 1. Default 5, as in the source.
        decay: share of the old slow weights that stays. Number in (0, 1). Default 0.5, as in the source.
        power: with more than 0, stays = decay · progress^power: next to nothing at first, `decay` at the end, as
            in airbench (0.95^5 and 3). Number ≥ 0. Default 0: always `decay`.

    Raises:
        PlanError: at construction, if a value is out of range; by `session`, under DeepSpeed's stage 3.

    Source: Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back", 2019, arXiv:1907.08610; with `power`
    Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, arXiv:2404.00498.
    """

    interval: int = 5
    decay: float = 0.5
    power: float = 0.0

    kind: ClassVar[Kind] = "loop"
    source: ClassVar[str] = "Zhang et al. 2019, arXiv:1907.08610"
    unsafe_with: ClassVar[tuple[str, ...]] = ("deepspeed",)

    def __post_init__(self) -> None:
        check_count(self, "interval", 1)
        check_range(self, "decay", "(0, 1)")
        check_range(self, "power", "[0, inf)")

    def stays(self, progress: float) -> float:
        """The share of the old slow weights that stays, at this share of the training (0 to 1)."""
        return float(self.decay * progress**self.power)

    def session(self, model: nn.Module) -> Session:
        """Begins with the weights of `model`, which is on its device, sharded and loaded."""
        return LookaheadSession(self, model)


class LookaheadSession(Session):
    """The slow weights of one training."""

    def __init__(self, options: Lookahead, model: nn.Module) -> None:
        self._options = options
        self._slow = Averages(model)
        self._steps = 0

    def after_step(self, progress: float) -> None:
        """Counts the step; every `interval` steps moves the slow weights, and the model to them."""
        self._steps += 1
        if self._steps % self._options.interval == 0:
            self._slow.add(1 - self._options.stays(progress))
            self._slow.install()

    def evaluating(self) -> AbstractContextManager[None]:
        """The model has the slow weights inside it."""
        return self._slow.installed()

    def finish(self) -> None:
        """The model keeps the slow weights."""
        self._slow.install()

    def state_dict(self) -> dict[str, Any]:
        """`{"steps": int, "averages": {name: tensor}}`."""
        return {"steps": self._steps, "averages": self._slow.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave, of the same model."""
        self._slow.load_state_dict(state["averages"])
        self._steps = state["steps"]


__all__ = ["Lookahead", "LookaheadSession"]
