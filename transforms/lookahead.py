"""Lookahead: every few steps, pull the weights part of the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from ..common.options.config import Within
from .base import Positive, ProperFraction, Session, Transform
from .common.averaging import AveragedSession, Averages


@dataclass(frozen=True)
class Lookahead(Transform):
    """Every `interval` steps, set slow = stays · slow + (1 - stays) · weight, and the weights to slow.

    Evaluation and the end of training use the slow weights. Buffers such as BatchNorm's running statistics are treated
    like weights. The optimizer's state (momentum) does not change. Memory: one more copy of the model. DeepSpeed trains
    copies of the weights that only its optimizer updates, which would undo it.

    Attributes:
        interval: optimizer steps between two updates. Integer ≥ 1. Default 5, as in the paper.
        decay: fraction of the old slow weights to keep. Number in (0, 1). Default 0.5, as in the paper.
        power: if above 0, stays = decay · progress^power: close to 0 at first, `decay` at the end, as in airbench
            (0.95^5 and 3). Number ≥ 0. Default 0: always `decay`.

    Source: Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back", 2019, arXiv:1907.08610; with `power`
    Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, arXiv:2404.00498.

    Example::

        >>> slow = Lookahead(interval=5).session(model)
        >>> slow.after_step(progress=0.1)  # after each optimizer step
        >>> slow.finish()
    """

    interval: Positive = 5
    decay: ProperFraction = 0.5
    power: Annotated[float, Within("[0, inf)")] = 0.0

    kind = "loop"
    source = "Zhang et al. 2019, arXiv:1907.08610"
    unsafe_with = ("deepspeed",)
    averages_weights = True

    @property
    def depends_on_length(self) -> bool:
        return self.power > 0

    def stays(self, progress: float) -> float:
        """Return the fraction of the old slow weights to keep at `progress` (0 to 1)."""
        return float(self.decay * progress**self.power)

    def note(self, total_steps: int) -> str:
        """Return a warning if the run ends before the first update: evaluation would use the initial weights."""
        if total_steps >= self.interval:
            return ""
        return (
            f"{self}: in a run of {total_steps} steps it never updates its slow weights, which evaluation and the "
            "result use: they stay the initial ones. Train longer, or set a shorter interval."
        )

    def session(self, model: nn.Module) -> Session:
        def move(slow: Averages, progress: float) -> None:
            slow.add(1 - self.stays(progress))
            slow.install()

        return AveragedSession(model, self.interval, move)
