"""EMA: evaluate with an exponential moving average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..common.errors import PlanError
from .base import AboveZero, Positive, ProperFraction, Session, Transform
from .common.averaging import AveragedSession


@dataclass(frozen=True)
class EMA(Transform):
    """Keep average = smoothing · average + (1 - smoothing) · weight, and evaluate with the average.

    Buffers such as BatchNorm's running statistics are averaged like the weights; counters are copied (in Composer,
    `num_batches_tracked` becomes 0). Half precision is averaged in float32. Memory: one more copy of the model, two
    inside `evaluating()`. Not supported with DeepSpeed stage 3, which partitions the parameters.

    The average starts from the weights at `session`; with a half-life near the training's length, they dominate it.

    Attributes:
        half_life: steps to halve a weight's influence. Number > 0; None with `smoothing`. Default 1000 (Composer).
        smoothing: fraction of the average kept at each update, whatever `update_every`. Number in (0, 1), or None.
        update_every: optimizer steps between updates. Integer ≥ 1. Default 1, as in Composer.

    Source: Tarvainen and Valpola, "Mean teachers are better role models", 2017, arXiv:1703.01780.

    Example::

        >>> averages = EMA(half_life=100).session(model)
        >>> averages.after_step(progress=0.1)  # after each optimizer step
        >>> with averages.evaluating():
        ...     logits = model(images)
    """

    half_life: AboveZero | None = 1000
    smoothing: ProperFraction | None = None
    update_every: Positive = 1

    kind = "loop"
    source = "Tarvainen and Valpola 2017, arXiv:1703.01780"
    unsafe_with = ("deepspeed_stage_3",)
    averages_weights = True
    depends_on_length = False  # only the number of steps matters

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.half_life is None) == (self.smoothing is None):
            raise PlanError(
                f"EMA(half_life={self.half_life!r}, smoothing={self.smoothing!r}): set exactly one of the two, and "
                "the other to None."
            )

    @property
    def share(self) -> float:
        """The weight of the newest values in an update: 1 - smoothing."""
        if self.smoothing is not None:
            return 1 - self.smoothing
        assert self.half_life is not None, "__post_init__ ensures that one of the two is set"
        return float(1 - 2 ** (-self.update_every / self.half_life))

    def share_of_start(self, steps: int) -> float:
        """Return the fraction of the average that still comes from the weights at `session` after `steps` steps."""
        return float((1 - self.share) ** (steps // self.update_every))

    def note(self, total_steps: int) -> str:
        """Return a warning if the average would mostly be weights from before training. It is not an error: the same
        recipe is fine for more epochs, and one epoch is a legitimate trial."""
        share = self.share_of_start(total_steps)
        if share < 0.1:
            return ""
        return (
            f"{self}: after all {total_steps} steps its average, which evaluation and the result use, still consists "
            f"of {share:.0%} initial weights. Train longer, or set a shorter half-life."
        )

    def session(self, model: nn.Module) -> Session:
        return AveragedSession(model, self.update_every, lambda averages, _: averages.add(self.share))
