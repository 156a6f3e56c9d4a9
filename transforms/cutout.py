"""CutOut: blank a square of each image, so that no single part of an object is decisive."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.transfer import to_device
from .base import BatchContext, FractionAboveZero, Positive, Transform
from .common.images import check_batch


@dataclass(frozen=True)
class CutOut(Transform):
    """Set squares of each image to 0, which is the mean color in normalized images.

    As in the paper, every image gets its own squares, centered on any pixel and clipped at the edges (Composer blanks
    the same square in the whole batch). It is applied after SelectiveBackprop, which ranks complete images.

    Attributes:
        holes: squares per image; they may overlap. Integer ≥ 1. Default 1, as in the paper.
        length: side of a square as a fraction of the image's shorter side, but at least two pixels. Number in (0, 1].
            Default 0.5: the paper's 16 of 32 pixels for CIFAR-10, and Composer's default.

    Source: DeVries and Taylor, "Improved Regularization of CNNs with Cutout", 2017, arXiv:1708.04552.

    Example::

        >>> cut, labels = CutOut(holes=1, length=0.5).batch(images, labels, BatchContext(torch.Generator()))
        >>> bool((cut == 0).any())
        True
    """

    holes: Positive = 1
    length: FractionAboveZero = 0.5

    kind = "batch"
    source = "DeVries and Taylor 2017, arXiv:1708.04552"
    keeps_samples = True
    after = ("EfficientTrain", "SelectiveBackprop")
    depends_on_length = False  # each step depends only on its own random numbers

    def batch(self, images: Tensor, targets: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Return the blanked images and the unchanged targets, which may be masks (B, H, W)."""
        masks = images.dim() == 4 and targets.shape == (len(images), *images.shape[2:])
        if not masks:  # these stay: what is hidden is still to be segmented
            check_batch(self, images, targets)
        height, width = images.shape[-2:]
        shape = (len(images), self.holes)
        drawn = [torch.randint(n, shape, generator=context.generator, device="cpu") for n in (height, width)]
        y, x = to_device(torch.stack(drawn), images.device)
        side = max(int(min(height, width) * self.length), 2)  # a smaller one would hide nothing
        hole = inside(y, x, height, width, side)
        # clone preserves the memory format, masked_fill does not.
        return images.clone().masked_fill_(hole[:, None], 0), targets


def inside(y: Tensor, x: Tensor, height: int, width: int, side: int) -> Tensor:
    """Return which pixels lie in one of the squares around the centers (B, holes): (B, H, W), bool. An odd side is
    rounded down to even, because its half is whole pixels."""
    half = side // 2
    rows, columns = (torch.arange(n, device=y.device) for n in (height, width))
    in_rows = (rows >= y[..., None] - half) & (rows < y[..., None] + half)
    in_columns = (columns >= x[..., None] - half) & (columns < x[..., None] + half)
    return (in_rows[..., :, None] & in_columns[..., None, :]).any(1)
