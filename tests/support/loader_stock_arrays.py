"""Stock FFCV with images in ndarray fields, in a process of its own, as in `loader_stock_ffcv.py`.

Called with a folder, it writes a `theirs-*.beton` per shape and type there with its DatasetWriter, then reads every
`.beton` of the folder with its own decoders, and saves what they give as `.npz`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, NDArrayField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.writer import DatasetWriter
from numpy.typing import NDArray

COUNT = 7
KINDS = {
    "grey": ("uint8", (20, 24)), "wide": ("uint16", (20, 24)), "one": ("uint16", (20, 24, 1)),
    "colour": ("uint8", (20, 24, 3)), "four": ("uint16", (20, 24, 4)),
}  # fmt: skip


def pixels(name: str) -> NDArray[Any]:
    """The images of one kind, `(COUNT, H, W)` or `(COUNT, H, W, C)`."""
    dtype, shape = KINDS[name]
    return (
        np.random.default_rng(len(name)).integers(0, np.iinfo(dtype).max + 1, (COUNT, *shape)).astype(dtype)
    )


class Pairs:
    """Images of one kind, with their numbers."""

    def __init__(self, name: str) -> None:
        self.images = pixels(name)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[NDArray[Any], int]:
        return self.images[index], int(index)


def read(path: Path) -> None:
    loader = Loader(
        str(path), batch_size=3, num_workers=1, order=OrderOption.SEQUENTIAL, drop_last=False,
        pipelines={"image": [NDArrayDecoder()], "label": [IntDecoder()]},
    )  # fmt: skip
    batches = [[part.copy() for part in batch] for batch in loader]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    np.savez(path.with_suffix(".npz"), images=images, labels=labels[:, 0])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, (dtype, shape) in KINDS.items():
        fields = {"image": NDArrayField(np.dtype(dtype), shape), "label": IntField()}
        writer = DatasetWriter(str(folder / f"theirs-{name}.beton"), fields, num_workers=1, page_size=1 << 21)
        writer.from_indexed_dataset(Pairs(name), chunksize=3)
    for path in sorted(folder.glob("*.beton")):
        read(path)
