"""SeqLengthWarmup: short token sequences first, then longer ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..common.errors import DataError, PlanError
from .base import BatchContext, Fraction, Positive, Transform


@dataclass(frozen=True)
class SeqLengthWarmup(Transform):
    """Truncate sequences (B, L) to a length that grows in steps. Defaults are Composer's.

    Attributes:
        duration: fraction of training until the maximum length is reached. Number in [0, 1]. Default 0.3.
        min_seq_length: initial length, in tokens. Integer ≥ 1. Default 8.
        max_seq_length: final length, at least `min_seq_length`; longer sequences are truncated. Default 1024.
        step_size: tokens by which the length grows. Integer ≥ 1. Default 8.
        truncate: True drops the tokens beyond the length; False turns them into further sequences. Default True.

    Source: Li et al., "Curriculum Learning", 2021, arXiv:2108.06084.

    Example::

        >>> SeqLengthWarmup(duration=0.5, max_seq_length=128).length(0.25)
        64
    """

    duration: Fraction = 0.3
    min_seq_length: Positive = 8
    max_seq_length: Positive = 1024
    step_size: Positive = 8
    truncate: bool = True

    kind = "batch"
    source = "Li et al. 2021, arXiv:2108.06084"
    takes_tokens = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_seq_length < self.min_seq_length:
            raise PlanError(
                f"SeqLengthWarmup(min_seq_length={self.min_seq_length}, max_seq_length={self.max_seq_length}): the "
                "maximum is below the minimum. Swap the two."
            )

    @property
    def depends_on_length(self) -> bool:
        return self.duration > 0 and self.min_seq_length < self.max_seq_length

    def length(self, progress: float) -> int:
        """Return the tokens per sequence at `progress`, 0 to 1."""
        if progress >= self.duration:
            return self.max_seq_length
        steps = (self.max_seq_length - self.min_seq_length) // self.step_size
        # A small offset, so that rounding in k/n does not select the previous length.
        done = math.floor(progress / self.duration * steps + 1e-9)
        return min(self.min_seq_length + done * self.step_size, self.max_seq_length)

    def batch(self, images: Tensor, targets: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Return tokens and targets at the length for `context.progress`; shorter batches are unchanged.

        Args:
            images: tokens (B, L).
            targets: (B, L), truncated like the tokens, or (B,), unchanged; (B,) requires `truncate`.
            context: supplies the progress.

        Returns:
            Tokens (B, l) with `truncate`, else (B·L // l, l) without the remainder; targets likewise.
        """
        if images.dim() != 2 or targets.shape not in (images.shape, images.shape[:1]):
            raise DataError(
                f"SeqLengthWarmup: unsupported tokens {tuple(images.shape)} with targets {tuple(targets.shape)}. "
                "Pass tokens (B, L) with targets (B, L) or (B,)."
            )
        length = self.length(context.progress)
        if length >= images.shape[1]:
            return images, targets
        along = targets.dim() == 2
        if self.truncate:
            return images[:, :length].contiguous(), targets[:, :length].contiguous() if along else targets
        if not along:
            raise DataError(
                "SeqLengthWarmup(truncate=False): a sequence with a single target cannot be split into several. Set "
                "truncate=True or pass targets (B, L)."
            )
        return _divided(images, length), _divided(targets, length)


def _divided(tokens: Tensor, length: int) -> Tensor:
    """Reshape (B, L) to (B·L // length, length), without the remainder."""
    whole = tokens.numel() // length * length
    return tokens.reshape(-1)[:whole].view(-1, length)
