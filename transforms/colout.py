"""ColOut: drop random rows and columns, which gives smaller images that look nearly the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.transfer import to_device
from .base import BatchContext, FractionBelowOne, Transform
from .common.images import check_batch, height_width, keep_format


@dataclass(frozen=True)
class ColOut(Transform):
    """Drop random rows and columns, the same for all images of a batch.

    Of H rows int((1 - row) · H) remain, as in Composer, and at least one. It is applied after
    SelectiveBackprop, which ranks complete images.

    Attributes:
        row: fraction of the rows to drop. Number in [0, 1). Default 0.15, as in Composer.
        column: fraction of the columns to drop. Number in [0, 1). Default 0.15, as in Composer.

    Source: MosaicML, Composer's method card "ColOut", 2021.

    Example::

        >>> smaller, labels = ColOut(0.25, 0.25).batch(images, labels, BatchContext(torch.Generator()))
        >>> smaller.shape
        torch.Size([8, 3, 24, 24])
    """

    row: FractionBelowOne = 0.15
    column: FractionBelowOne = 0.15

    kind = "batch"
    source = "MosaicML 2021, Composer's method card ColOut"
    keeps_samples = True
    targets = ("class indices", "labels", "values")
    after = ("EfficientTrain", "SelectiveBackprop")
    depends_on_length = False  # each step depends only on its own random numbers

    def sizes(self, image_size: int | tuple[int, int]) -> tuple[int | tuple[int, int], ...]:
        height, width = height_width(image_size)
        return ((_count(height, self.row), _count(width, self.column)),)

    def batch(self, images: Tensor, targets: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Return smaller images (B, 3, h, w) and the unchanged targets."""
        check_batch(self, images, targets)
        rows = _kept(images.shape[2], self.row, context.generator)
        columns = _kept(images.shape[3], self.column, context.generator)
        both = to_device(torch.cat([rows, columns]), images.device)
        rows, columns = both[: len(rows)], both[len(rows) :]
        return keep_format(images.index_select(2, rows).index_select(3, columns), images), targets


def _count(size: int, dropped: float) -> int:
    return max(int((1 - dropped) * size), 1)


def _kept(size: int, dropped: float, generator: torch.Generator) -> Tensor:
    return torch.randperm(size, generator=generator, device="cpu")[: _count(size, dropped)].sort().values
