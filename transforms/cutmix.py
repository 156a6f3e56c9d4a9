"""CutMix: a box of each image replaced by the same box of another, and its target mixed by area."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import BatchContext, Kind, Transform
from .common.checks import check_range
from .common.draws import draw_beta
from .common.images import check_batch, draw_partners, mix_targets, soft_targets

Box = tuple[int, int, int, int]
"""(top, bottom, left, right) in pixels; bottom and right are the first outside."""


@dataclass(frozen=True)
class CutMix(Transform):
    """Pastes one box, the same for the whole batch, from another image of the batch into each image.

    As in the source: lambda is drawn from Beta(alpha, alpha), the box has the share 1 - lambda of the
    area and the image's proportions, its centre is any pixel, and what lies outside the image is lost.
    The targets are then mixed by the area that was really replaced. A batch that was mixed before, with
    targets (B, C), is mixed once more: MixUp and CutMix compose in either order (in Composer, CutMix's
    target ignores an earlier MixUp). It stands after SelectiveBackprop, which ranks images that are whole.

    Attributes:
        alpha: both parameters of the Beta distribution; 1 draws lambda evenly. Number > 0. Default 1.0,
            the value of the source.

    Raises:
        PlanError: at construction, if the value is out of range.

    Source: Yun et al., "CutMix", 2019, arXiv:1905.04899.
    """

    alpha: float = 1.0

    kind: ClassVar[Kind] = "batch"
    source: ClassVar[str] = "Yun et al. 2019, arXiv:1905.04899"
    after: ClassVar[tuple[str, ...]] = ("SelectiveBackprop",)

    def __post_init__(self) -> None:
        check_range(self, "alpha", "(0, inf)")

    @property
    def depends_on_length(self) -> bool:
        """No: each step draws from its own random numbers alone."""
        return False

    def batch(
        self, images: torch.Tensor, targets: torch.Tensor, context: BatchContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mixed batch. A batch of one keeps its image, and only its target becomes soft.

        Args:
            images: (B, 3, H, W); dtype and memory format stay.
            targets: (B,) class indices or (B, C) probabilities.
            context: gives the randomness, and the number of classes for class indices.

        Returns:
            Images (B, 3, H, W) and targets (B, C) in float32.

        Raises:
            DataError: if the batch has another shape, or a target on the CPU is no class (such as -100).
                On a CUDA device its row, and so the loss, becomes NaN.
        """
        check_batch(self, images, targets)
        soft = soft_targets(self, targets, context.classes)
        height, width = images.shape[-2:]
        kept = draw_beta(self.alpha, context.generator)
        y, x = (
            int(torch.randint(n, (), generator=context.generator, dtype=torch.int64)) for n in (height, width)
        )
        partner = draw_partners(images, context.generator)
        if len(images) == 1:
            return images, soft
        box = box_around(y, x, height, width, kept)
        return paste(images, partner, box), mix_targets(soft, partner, area(box) / (height * width))


def box_around(y: int, x: int, height: int, width: int, kept: float) -> Box:
    """The box around pixel (y, x) that takes the share 1 - `kept` of the image, cut at its edges.

    Half sides are whole pixels, so the box is up to a pixel smaller than asked for; hence `area`.
    """
    side = math.sqrt(1 - kept)
    half_h, half_w = int(height * side) // 2, int(width * side) // 2
    return max(y - half_h, 0), min(y + half_h, height), max(x - half_w, 0), min(x + half_w, width)


def area(box: Box) -> int:
    """Pixels in the box."""
    top, bottom, left, right = box
    return (bottom - top) * (right - left)


def paste(images: torch.Tensor, partner: torch.Tensor, box: Box) -> torch.Tensor:
    """Images (B, C, H, W) with the box of `images[partner]`; `partner` holds (B,) indices."""
    top, bottom, left, right = box
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images[..., top:bottom, left:right][partner]
    return mixed


__all__ = ["Box", "CutMix", "area", "box_around", "paste"]
