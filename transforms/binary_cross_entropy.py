"""BinaryCrossEntropy: an independent binary loss per class replaces softmax cross entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.errors import PlanError
from .base import Loss, Transform
from .label_smoothing import IGNORED, misfit


@dataclass(frozen=True)
class BinaryCrossEntropy(Transform):
    """Train with binary cross entropy, summed over the classes, instead of `F.cross_entropy`.

    Summing instead of averaging over the classes keeps learning rates at the same scale as cross entropy. The model can
    be certain of both classes of a mixed image (MixUp, CutMix).

    log C is subtracted from the logits first. An untrained model then predicts about 1 / C per class, and its loss is
    about 1 + log C instead of C · log 2 (8 instead of 693 for ImageNet). Composer's recipes initialize the last layer's
    bias likewise. Softmax, accuracy and evaluation are unaffected; a class's probability is sigmoid(logit - log C).
    It replaces the loss itself, so it is applied before LabelSmoothing, which changes the loss's targets.

    Source: Beyer et al., "Are we done with ImageNet?", 2020, arXiv:2006.07159; with mixed targets Wightman et al.,
    "ResNet strikes back", 2021, arXiv:2110.00476.

    Example::

        >>> loss = BinaryCrossEntropy().loss(nn.functional.cross_entropy)
        >>> loss(torch.zeros(8, 2), labels).shape
        torch.Size([])
    """

    kind = "loss"
    source = "Beyer et al. 2020, arXiv:2006.07159"
    targets = ("class indices",)

    def loss(self, loss: Loss) -> Loss:
        if loss is F.cross_entropy:
            return binary_cross_entropy
        raise PlanError(
            f"BinaryCrossEntropy replaces F.cross_entropy, but got {loss!r:.80}. Apply it first, before LabelSmoothing."
        )


def binary_cross_entropy(logits: Tensor, targets: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
    """Return the binary cross entropy of sigmoid(logits - log C), summed over the classes, in float32 or better: the
    mean over the images that are not ignored (-100), or one value per image, 0 for ignored ones."""
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
