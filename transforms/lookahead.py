"""Lookahead: every few steps the weights go back, part of the way, to where they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from .base import Kind, Session, Transform
from .common.averaging import AveragedSession, Averages
from .common.checks import check_count, check_range


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

    @property
    def depends_on_length(self) -> bool:
        """With `power`, which follows the share of the training that is done."""
        return self.power > 0

    def stays(self, progress: float) -> float:
        """The share of the old slow weights that stays, at this share of the training (0 to 1)."""
        return float(self.decay * progress**self.power)

    def session(self, model: nn.Module) -> Session:
        """Begins with the weights of `model`, which is on its device, sharded and loaded."""

        def move(slow: Averages, progress: float) -> None:
            slow.add(1 - self.stays(progress))
            slow.install()

        return AveragedSession(model, self.interval, move)


__all__ = ["Lookahead"]
