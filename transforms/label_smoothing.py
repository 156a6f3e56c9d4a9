"""LabelSmoothing: slightly less certain targets, so that the logits need not grow without bound."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.errors import DataError, PlanError
from .base import FractionBelowOne, Loss, Transform
from .common.images import spread_indices

IGNORED = -100
"""The class index to ignore: PyTorch's default, in `F.cross_entropy` for example."""


@dataclass(frozen=True)
class LabelSmoothing(Transform):
    """Train on (1 - smoothing) · target + smoothing / C instead of the target.

    Cross entropy (`F.cross_entropy`, a `functools.partial` of it, or `nn.CrossEntropyLoss`) uses PyTorch's own
    `label_smoothing`, with its class weights and `ignore_index`. Any other loss receives soft targets (B, C), in
    float32 or better. A loss that already smooths is rejected.

    Mixing (MixUp, CutMix) creates soft targets before the loss is called, so smoothing comes after it. In Composer the
    other order leaves half the mixture unsmoothed. BinaryCrossEntropy, which replaces the loss, comes before.

    Attributes:
        smoothing: fraction of the target spread over all classes. Number in [0, 1). Default 0.1, as in the paper.

    Source: Szegedy et al., "Rethinking the Inception Architecture", 2016, arXiv:1512.00567, section 7.

    Example::

        >>> loss = LabelSmoothing(0.1).loss(nn.functional.cross_entropy)
        >>> loss(torch.zeros(8, 2), labels).shape
        torch.Size([])
    """

    smoothing: FractionBelowOne = 0.1

    kind = "loss"
    source = "Szegedy et al. 2016, arXiv:1512.00567"
    targets = ("class indices",)
    after = ("BinaryCrossEntropy",)

    def loss(self, loss: Loss) -> Loss:
        """Return the smoothed loss, which can be pickled if `loss` can."""
        self._refuse_twice(loss)
        if type(loss) is nn.CrossEntropyLoss:
            smoothed = copy.copy(loss)
            smoothed.label_smoothing = self.smoothing
            return smoothed
        if _is_cross_entropy(loss):
            return functools.partial(cast(Callable[..., Tensor], loss), label_smoothing=self.smoothing)
        return SmoothedLoss(loss, self.smoothing)

    def _refuse_twice(self, loss: Loss) -> None:
        if isinstance(loss, nn.CrossEntropyLoss):
            before = loss.label_smoothing
        elif isinstance(loss, functools.partial):
            before = loss.keywords.get("label_smoothing", 0.0)
        else:
            before = loss.smoothing if isinstance(loss, SmoothedLoss) else 0.0
        if before:
            raise PlanError(
                f"LabelSmoothing({self.smoothing}): the loss already smooths its labels by {before}. "
                "Remove one of the two."
            )


@dataclass(frozen=True)
class SmoothedLoss:
    """`base`, called with smoothed targets: how `LabelSmoothing.loss` wraps an unknown loss."""

    base: Loss
    smoothing: float

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of logits (B, C) and targets, (B,) class indices or (B, C) probabilities. An index -100 drops
        its row; on a CUDA device, where counting the remaining rows would synchronize, it makes the loss NaN."""
        indices = targets.shape == logits.shape[:1] and not targets.is_floating_point()
        if logits.dim() == 2 and indices and logits.device.type == "cpu":
            # An unknown loss takes no row weights, so the row itself has to be dropped.
            kept = targets != IGNORED
            logits, targets = logits[kept], targets[kept]
        return self.base(logits, smooth_targets(logits, targets, self.smoothing))


def smooth_targets(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return (1 - smoothing) · target + smoothing / C: (B, C) in float32, or in float64 if the logits are: bfloat16
    cannot hold 1 - 0.1 + 0.1 / C. For an index outside 0 to C - 1 see `spread_indices`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if targets.shape == logits.shape:
        return targets.to(dtype) * (1 - smoothing) + smoothing / logits.shape[1]
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or targets.is_floating_point():
        raise misfit("LabelSmoothing", logits, targets)
    spread = smoothing / logits.shape[1]
    return spread_indices(targets, logits.shape[1], spread, 1 - smoothing + spread, dtype)


def misfit(owner: str, logits: Tensor, targets: Tensor) -> DataError:
    return DataError(
        f"{owner}: logits {tuple(logits.shape)} do not match targets {tuple(targets.shape)} of {targets.dtype}. Pass "
        "logits (B, C) with class indices (B,) or probabilities (B, C)."
    )


def _is_cross_entropy(loss: Loss) -> bool:
    partial = isinstance(loss, functools.partial) and loss.func is F.cross_entropy and not loss.args
    return partial or loss is F.cross_entropy
