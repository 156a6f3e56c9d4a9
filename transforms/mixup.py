"""MixUp: blend each image with another image of the batch, and their targets likewise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import BatchContext, Kind, Transform
from .common.checks import check_range
from .common.draws import draw_beta
from .common.images import check_batch, check_mixable, draw_partners, keep_format, mix_targets, soft_targets


@dataclass(frozen=True)
class MixUp(Transform):
    """Train on (1 - s) · image + s · another image of the batch, with the targets mixed by the same s.

    s is drawn once per batch, as min(z, 1 - z) of z from Beta(alpha, alpha), so that each mixture is dominated by
    its own image (as in Composer). A batch that is already mixed, with targets (B, C), is mixed again: MixUp and
    CutMix compose in either order. It is applied after SelectiveBackprop, which ranks complete images.

    Attributes:
        alpha: both parameters of the Beta distribution; larger values mix more evenly. Number > 0. Default 0.2,
            from the paper's ImageNet runs (0.1 to 0.4) and Composer.

    Raises:
        PlanError: at construction, if the value is out of range.

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018, arXiv:1710.09412.

    Example::

        >>> mixed, targets = MixUp(0.2).batch(images, labels, BatchContext(torch.Generator(), classes=2))
        >>> targets.shape
        torch.Size([8, 2])
    """

    alpha: float = 0.2

    kind: ClassVar[Kind] = "batch"
    source: ClassVar[str] = "Zhang et al. 2018, arXiv:1710.09412"
    targets: ClassVar[tuple[str, ...] | None] = ("class indices", "labels")
    soft_targets: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ("SelectiveBackprop",)
    depends_on_length: ClassVar[bool] = False  # each step depends only on its own random numbers

    def __post_init__(self) -> None:
        check_range(self, "alpha", "(0, inf)")

    def batch(
        self, images: torch.Tensor, targets: torch.Tensor, context: BatchContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mixed batch. A batch of one keeps its image; only its target becomes soft.

        Args:
            images: (B, 3, H, W), floating-point; dtype and memory format are preserved.
            targets: (B,) class indices or (B, C) probabilities.
            context: supplies the randomness, and the number of classes for class indices.

        Returns:
            Images (B, 3, H, W) and targets (B, C) in float32.

        Raises:
            DataError: if the batch has another shape or dtype, or a target on the CPU is not a class index (such as
                -100). On a CUDA device its row, and so the loss, becomes NaN.
        """
        check_batch(self, images, targets)
        check_mixable(self, images)
        soft = soft_targets(self, targets, context.classes)
        z = draw_beta(self.alpha, context.generator)
        share = min(z, 1 - z)
        partner = draw_partners(images, context.generator)
        if len(images) == 1:
            return images, soft
        return mix_images(images, partner, share), mix_targets(soft, partner, share)


def mix_images(images: torch.Tensor, partner: torch.Tensor, share: float) -> torch.Tensor:
    """Return (1 - share) · images + share · images[partner]; images (B, C, H, W), partner (B,) indices."""
    return keep_format(images.lerp(images[partner], share), images)
