"""ProgressiveResizing: small images first, full size at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import PlanError
from .base import BatchContext, Kind, Transform
from .common.checks import check_count, check_range
from .common.images import check_batch, resize


@dataclass(frozen=True)
class ProgressiveResizing(Transform):
    """Trains on images of growing size, in three parts: small, growing linearly, full size.

    A loader that resizes in its decoder asks `size` and saves decoding too; for others `batch` resizes
    the tensors, bilinear and antialiased. Only one of the two: `batch` takes images of the full size.
    (Composer documents bilinear and takes the nearest pixel.)

    Attributes:
        initial_scale: side at the start, as a share of the full side. Number in (0, 1]. Default 0.5, as in
            Composer and its ResNet recipes.
        delay: share of the training at the initial size. Number in [0, 1]. Default 0.5, as in Composer.
        finetune: share of the training at full size, at the end. Number in [0, 1]. Default 0.2, as in
            Composer.
        size_increment: sizes below the full one are multiples of it, in pixels. Whole number ≥ 1.
            Default 4, as in Composer.

    Raises:
        PlanError: at construction, if a value is out of range, or `delay` and `finetune` exceed 1.

    Source: Howard and Gugger, fastai's "Progressive Resizing", fastbook chapter 7, 2020.
    """

    initial_scale: float = 0.5
    delay: float = 0.5
    finetune: float = 0.2
    size_increment: int = 4

    kind: ClassVar[Kind] = "batch"
    source: ClassVar[str] = "Howard and Gugger 2020, fastbook chapter 7"

    def __post_init__(self) -> None:
        check_range(self, "initial_scale", "(0, 1]")
        check_range(self, "delay", "[0, 1]")
        check_range(self, "finetune", "[0, 1]")
        check_count(self, "size_increment", 1)
        if self.delay + self.finetune > 1 + 1e-9:  # 0.7 + 0.3 may be a little above 1
            raise PlanError(
                f"ProgressiveResizing(delay={self.delay}, finetune={self.finetune}): together they are more "
                "than the whole training; give two shares of at most 1 together."
            )

    @property
    def depends_on_length(self) -> bool:
        """Unless `finetune` is the whole training."""
        return self.finetune < 1

    def size(self, image_size: int, progress: float) -> int:
        """The side to train at, in pixels.

        From `image_size` times `initial_scale`, rounded to a multiple of `size_increment` (at least one),
        to `image_size` itself, even where that is no multiple.

        Args:
            image_size: full side, in pixels.
            progress: share of the training done, 0 to 1.
        """
        # A little less than the share, which a progress of k/n may miss by the last bit.
        if progress >= 1 - self.finetune - 1e-9:
            return image_size
        ramp = max(1 - self.finetune - self.delay, 1e-9)
        risen = max(progress - self.delay, 0.0) / ramp
        scale = self.initial_scale + (1 - self.initial_scale) * risen
        steps = max(round(image_size * scale / self.size_increment), 1)
        return min(steps * self.size_increment, image_size)

    def batch(
        self, images: torch.Tensor, targets: torch.Tensor, context: BatchContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (B, 3, h, w) of the size for `context.progress`, and the targets as they are.

        `images` (B, 3, H, W) are of full size; w is `size` of W, and h keeps the proportions. Dtype and
        memory format stay. At full size the images are returned themselves.

        Raises:
            DataError: if the batch has another shape.
        """
        check_batch(self, images, targets)
        height, width = images.shape[-2:]
        small = self.size(width, context.progress)
        return resize(images, max(height * small // width, 1), small), targets


__all__ = ["ProgressiveResizing"]
