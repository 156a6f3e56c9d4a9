"""ColOut: drop random rows and columns, which gives smaller images that look nearly the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.transfer import to_device
from .base import BatchContext, Kind, Transform
from .common.checks import check_fraction
from .common.images import check_batch, keep_format


@dataclass(frozen=True)
class ColOut(Transform):
    """Drop random rows and columns, the same for all images of a batch.

    Of H rows int((1 - row) · H) remain, as in Composer, and at least one. It is applied after
    SelectiveBackprop, which ranks complete images.

    Attributes:
        row: fraction of the rows to drop. Number in [0, 1). Default 0.15, as in Composer.
        column: fraction of the columns to drop. Number in [0, 1). Default 0.15, as in Composer.

    Raises:
        PlanError: at construction, if a value is out of range.

    Source: MosaicML, Composer's method card "ColOut", 2021.

    Example::

        >>> smaller, labels = ColOut(0.25, 0.25).batch(images, labels, BatchContext(torch.Generator()))
        >>> smaller.shape
        torch.Size([8, 3, 24, 24])
    """

    row: float = 0.15
    column: float = 0.15

    kind: ClassVar[Kind] = "batch"
    source: ClassVar[str] = "MosaicML 2021, Composer's method card ColOut"
    targets: ClassVar[tuple[str, ...] | None] = ("class indices", "labels", "values")
    after: ClassVar[tuple[str, ...]] = ("SelectiveBackprop",)
    depends_on_length: ClassVar[bool] = False  # each step depends only on its own random numbers

    def __post_init__(self) -> None:
        check_fraction(self, "row")
        check_fraction(self, "column")

    def batch(
        self, images: torch.Tensor, targets: torch.Tensor, context: BatchContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return smaller images (B, 3, h, w), with the same dtype and memory format, and the unchanged targets.

        Raises:
            DataError: if the batch has another shape.
        """
        check_batch(self, images, targets)
        rows, columns = (
            _kept(size, share, context.generator)
            for size, share in zip(images.shape[2:], (self.row, self.column), strict=True)
        )
        both = to_device(torch.cat([rows, columns]), images.device)
        rows, columns = both[: len(rows)], both[len(rows) :]
        return keep_format(images.index_select(2, rows).index_select(3, columns), images), targets


def _kept(size: int, dropped: float, generator: torch.Generator) -> torch.Tensor:
    """Return the sorted indices of the rows or columns to keep."""
    count = max(int((1 - dropped) * size), 1)
    return torch.randperm(size, generator=generator)[:count].sort().values
