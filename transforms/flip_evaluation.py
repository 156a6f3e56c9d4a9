"""TestTimeFlip: evaluates each image and its mirror image, and takes the mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import DataError
from .base import Kind, Transform
from .images import keep_format


@dataclass(frozen=True)
class TestTimeFlip(Transform):
    """Predicts by the mean of the logits of the images and of their mirror images, left for right.

    Evaluation takes twice as long. Accuracies with it compare only with others that have it.

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012,
    section 4.1 (with crops); Jordan, "94% on CIFAR-10 in 3.29 Seconds", 2024, arXiv:2404.00498 (flip alone).
    """

    # pytest takes a class by that name for a test.
    __test__: ClassVar[bool] = False
    kind: ClassVar[Kind] = "evaluation"
    source: ClassVar[str] = "Krizhevsky et al. 2012; Jordan 2024, arXiv:2404.00498"

    def predict(self, model: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> torch.Tensor:
        """Logits (B, C), in float32 or better, of images (B, 3, H, W).

        Gradients and autocast are as the caller set them.

        Raises:
            DataError: if the images have another shape.
        """
        if images.dim() != 4:
            raise DataError(f"TestTimeFlip: images {tuple(images.shape)}; give (B, 3, H, W).")
        logits = model(images)
        wide = torch.promote_types(logits.dtype, torch.float32)
        mirrored = model(keep_format(images.flip(-1), images))
        return (logits.to(wide) + mirrored.to(wide)) / 2


__all__ = ["TestTimeFlip"]
