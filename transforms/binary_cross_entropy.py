"""BinaryCrossEntropy: a yes-or-no question for each class, in place of a choice among all of them.

Shapes: B batch, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from ..errors import PlanError
from .base import Kind, Loss, Transform
from .label_smoothing import IGNORED, misfit


@dataclass(frozen=True)
class BinaryCrossEntropy(Transform):
    """Trains by the binary cross entropy of each class, summed over the classes, in place of cross entropy.

    The sum, not the mean, over the classes keeps learning rates as they are for cross entropy. An image of two
    classes (MixUp, CutMix) may then be sure of both.

    Logits are lowered by log C first: an untrained model's probabilities are then near 1 / C, and its loss is
    near 1 + log C in place of C · log 2 (8 in place of 693 for ImageNet). Composer's recipes do the same by the
    last layer's first bias. Softmax, accuracy and the cross entropy of an evaluation do not change by it; the
    probability of a class by itself is sigmoid(logit - log C).

    It changes the loss itself, so it stands before LabelSmoothing, which changes its targets.

    Raises:
        PlanError: by `loss`, if that is not `F.cross_entropy`.

    Source: Beyer et al., "Are we done with ImageNet?", 2020, arXiv:2006.07159; with mixed targets
    Wightman et al., "ResNet strikes back", 2021, arXiv:2110.00476.
    """

    kind: ClassVar[Kind] = "loss"
    source: ClassVar[str] = "Beyer et al. 2020, arXiv:2006.07159"

    def loss(self, loss: Loss) -> Loss:
        """`binary_cross_entropy`, in place of `F.cross_entropy`."""
        if loss is F.cross_entropy:
            return binary_cross_entropy
        raise PlanError(
            f"BinaryCrossEntropy takes the place of F.cross_entropy, and was given {loss!r:.80}: apply it first, "
            "before LabelSmoothing."
        )


def binary_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, reduction: Literal["mean", "none"] = "mean"
) -> torch.Tensor:
    """The binary cross entropy of sigmoid(logits - log C), summed over the classes.

    Args:
        logits: (B, C).
        targets: (B,) class indices, where -100 counts for nothing, or (B, C) probabilities.
        reduction: `"mean"` over the images that count, or `"none"`: one value for each, 0 where it counts for
            nothing.

    Returns:
        `()` or `(B,)`, in float32, or in float64 if the logits are.

    Raises:
        DataError: if the shapes do not fit.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.dim() == 2 and targets.shape == logits.shape:
        counts, probabilities = torch.ones_like(logits[:, 0]), targets.to(logits.dtype)
    elif logits.dim() == 2 and targets.shape == logits.shape[:1] and not targets.is_floating_point():
        counts = (targets != IGNORED).to(logits.dtype)
        index = targets.long().where(targets != IGNORED, 0)[:, None]
        probabilities = torch.zeros_like(logits).scatter_(1, index, 1.0)
    else:
        raise misfit("BinaryCrossEntropy", logits, targets)
    lowered = logits - math.log(logits.shape[1])
    each = F.binary_cross_entropy_with_logits(lowered, probabilities, reduction="none").sum(1) * counts
    return each if reduction == "none" else each.sum() / counts.sum()


__all__ = ["BinaryCrossEntropy", "binary_cross_entropy"]
