"""CutMix: replace a box of each image by the same box of another image, and mix the targets by area."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import AboveZero, BatchContext, Transform
from .common.draws import draw_beta
from .common.images import check_batch, draw_partners, soft_targets

Box = tuple[int, int, int, int]
"""(top, bottom, left, right) in pixels; bottom and right are exclusive."""


@dataclass(frozen=True)
class CutMix(Transform):
    """Paste one box, the same for the whole batch, from another image of the batch into each image.

    As in the paper: lambda is drawn from Beta(alpha, alpha); the box covers a fraction 1 - lambda of the area, with the
    image's proportions; its center is any pixel, and it is clipped at the edges. The targets are mixed by the area
    actually replaced. A mixed batch, with targets (B, C), is mixed again: MixUp and CutMix compose in either order
    (Composer's targets ignore an earlier MixUp). It is applied after SelectiveBackprop, which ranks complete images.

    Attributes:
        alpha: both parameters of the Beta distribution; 1, as in the paper, is uniform. Number > 0. Default 1.0.

    Source: Yun et al., "CutMix", 2019, arXiv:1905.04899.

    Example::

        >>> mixed, targets = CutMix().batch(images, labels, BatchContext(torch.Generator(), classes=2))
        >>> targets.shape
        torch.Size([8, 2])
    """

    alpha: AboveZero = 1.0

    kind = "batch"
    source = "Yun et al. 2019, arXiv:1905.04899"
    targets = ("class indices", "labels")
    soft_targets = True
    after = ("EfficientTrain", "SelectiveBackprop")
    depends_on_length = False  # each step depends only on its own random numbers

    def batch(self, images: Tensor, targets: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Return the mixed images and targets (B, C) in float32. In a batch of one, only the target becomes soft.

        Raises:
            DataError: if the batch has another shape, or a target is no class index (-100); on CUDA, the loss is NaN.
        """
        check_batch(self, images, targets)
        soft = soft_targets(self, targets, context.classes)
        height, width = images.shape[-2:]
        kept = draw_beta(self.alpha, context.generator)
        y, x = (int(torch.randint(n, (), generator=context.generator, device="cpu")) for n in (height, width))
        partner = draw_partners(images, context.generator)
        if len(images) == 1:
            return images, soft
        box = box_around(y, x, height, width, kept)
        return paste(images, partner, box), soft.lerp(soft[partner], area(box) / (height * width))


def box_around(y: int, x: int, height: int, width: int, kept: float) -> Box:
    """Return the box around pixel (y, x) that covers a fraction 1 - `kept` of the image, clipped at its edges. Half
    sides are whole pixels, so the box is up to a pixel smaller than requested; hence `area`."""
    side = math.sqrt(1 - kept)
    half_h, half_w = int(height * side) // 2, int(width * side) // 2
    return max(y - half_h, 0), min(y + half_h, height), max(x - half_w, 0), min(x + half_w, width)


def area(box: Box) -> int:
    top, bottom, left, right = box
    return (bottom - top) * (right - left)


def paste(images: Tensor, partner: Tensor, box: Box) -> Tensor:
    top, bottom, left, right = box
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images[..., top:bottom, left:right][partner]
    return mixed
