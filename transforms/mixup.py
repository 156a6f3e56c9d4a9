"""MixUp: blend each image with another image of the batch, and their targets likewise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..common.errors import DataError
from .base import AboveZero, BatchContext, Transform
from .common.draws import draw_beta
from .common.images import check_batch, draw_partners, keep_format, soft_targets


@dataclass(frozen=True)
class MixUp(Transform):
    """Train on (1 - s) · image + s · another image of the batch, with the targets mixed by the same s.

    s is drawn once per batch, as min(z, 1 - z) of z from Beta(alpha, alpha), so that each mixture is dominated by
    its own image (as in Composer). A batch that is already mixed, with targets (B, C), is mixed again: MixUp and
    CutMix compose in either order. It is applied after SelectiveBackprop, which ranks complete images.

    Attributes:
        alpha: both parameters of the Beta distribution; larger values mix more evenly. Number > 0. Default 0.2,
            from the paper's ImageNet runs (0.1 to 0.4) and Composer.

    Source: Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018, arXiv:1710.09412.

    Example::

        >>> mixed, targets = MixUp(0.2).batch(images, labels, BatchContext(torch.Generator(), classes=2))
        >>> targets.shape
        torch.Size([8, 2])
    """

    alpha: AboveZero = 0.2

    kind = "batch"
    source = "Zhang et al. 2018, arXiv:1710.09412"
    targets = ("class indices", "labels")
    soft_targets = True
    after = ("EfficientTrain", "SelectiveBackprop")
    depends_on_length = False  # each step depends only on its own random numbers

    def batch(self, images: Tensor, targets: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Return the mixed images and targets (B, C) in float32. In a batch of one, only the target becomes soft.

        Raises:
            DataError: for another shape or dtype, or a target that is no class index (-100); on CUDA, the loss is NaN.
        """
        check_batch(self, images, targets)
        if not images.is_floating_point():
            raise DataError(
                f"MixUp: images of {images.dtype} cannot be averaged. Normalize them to floating point first."
            )
        soft = soft_targets(self, targets, context.classes)
        z = draw_beta(self.alpha, context.generator)
        share = min(z, 1 - z)
        partner = draw_partners(images, context.generator)
        if len(images) == 1:
            return images, soft
        return keep_format(images.lerp(images[partner], share), images), soft.lerp(soft[partner], share)
