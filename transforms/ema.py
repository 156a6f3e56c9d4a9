"""EMA: evaluates with weights averaged over the last steps, the newest counting most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..errors import PlanError
from .base import Kind, Session, Transform
from .common.averaging import AveragedSession
from .common.checks import check_count, check_range


@dataclass(frozen=True)
class EMA(Transform):
    """Keeps average = smoothing · average + (1 - smoothing) · weight, and evaluates with the average.

    Buffers such as BatchNorm's running statistics are averaged like the weights; counters are copied (in
    Composer `num_batches_tracked` becomes 0). Half precision is averaged in float32. Costs the model's
    memory once more, and twice inside `evaluating()`. DeepSpeed's stage 3 leaves nothing on the model to average.

    The average starts from the weights at `session`: a half-life near the length of the whole training would
    evaluate mostly those.

    Attributes:
        half_life: optimizer steps after which a weight counts half. Number > 0, or None if `smoothing` is
            given. Default 1000, as in Composer.
        smoothing: share of the old average that stays at each update; not adjusted to `update_every`.
            Number in (0, 1), or None for `half_life`. Default None.
        update_every: optimizer steps between updates. Whole number ≥ 1. Default 1, as in Composer.

    Raises:
        PlanError: at construction, if a value is out of range, or not exactly one of `half_life` and
            `smoothing` is given; by `session`, if DeepSpeed's stage 3 has divided the parameters.

    Source: Tarvainen and Valpola, "Mean teachers are better role models", 2017, arXiv:1703.01780.
    """

    half_life: float | None = 1000
    smoothing: float | None = None
    update_every: int = 1

    kind: ClassVar[Kind] = "loop"
    source: ClassVar[str] = "Tarvainen and Valpola 2017, arXiv:1703.01780"
    unsafe_with: ClassVar[tuple[str, ...]] = ("deepspeed_stage_3",)

    def __post_init__(self) -> None:
        if (self.half_life is None) == (self.smoothing is None):
            raise PlanError(
                f"EMA(half_life={self.half_life!r}, smoothing={self.smoothing!r}): give exactly one of the two, "
                "and None for the other."
            )
        if self.half_life is not None:
            check_range(self, "half_life", "(0, inf)")
        if self.smoothing is not None:
            check_range(self, "smoothing", "(0, 1)")
        check_count(self, "update_every", 1)

    @property
    def depends_on_length(self) -> bool:
        """No: it counts steps."""
        return False

    @property
    def share(self) -> float:
        """What the newest weights count in an update: 1 - smoothing."""
        if self.smoothing is not None:
            return 1 - self.smoothing
        assert self.half_life is not None, "__post_init__ left one of the two"
        return float(1 - 2 ** (-self.update_every / self.half_life))

    def share_of_start(self, steps: int) -> float:
        """What the weights at `session` still count in the average after so many steps, 0 to 1."""
        return float((1 - self.share) ** (steps // self.update_every))

    def session(self, model: nn.Module) -> Session:
        """Begins to average `model`, which is on its device, sharded and loaded."""
        return AveragedSession(model, self.update_every, lambda averages, _: averages.add(self.share))


__all__ = ["EMA"]
