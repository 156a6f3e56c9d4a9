"""Stock FFCV at work, in a process of its own: importing it changes thread counts and prints noise.

Called with a folder, it makes `theirs.beton` there with its DatasetWriter, then reads every `.beton` of the
folder with its Loader, and saves the result as `.npz` next to it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.writer import DatasetWriter
from loader_pictures import picture


class Pictures:
    """Ten pictures, the first four small; DatasetWriter stores images other than JPEGs according to its mode."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, int]:
        side = 20 if index < 4 else 64
        return picture(index, side, side + 4 * (index % 3)), index * index


def read(path: Path) -> None:
    """Save `crop`, the central squares of 32 pixels, and `labels`; `whole` images if all are of one size."""
    found: dict[str, Any] = {}
    decoders = {"crop": CenterCropRGBImageDecoder((32, 32), ratio=1.0)}
    if path.stem == "raw":
        decoders["whole"] = SimpleRGBImageDecoder()
    for name, decoder in decoders.items():
        loader = Loader(
            str(path),
            batch_size=4,
            num_workers=1,
            order=OrderOption.SEQUENTIAL,
            drop_last=False,
            pipelines={"image": [decoder], "label": [IntDecoder()]},
        )
        batches = [(images.copy(), labels.copy()) for images, labels in loader]
        found[name] = np.concatenate([images for images, _ in batches])
        found["labels"] = np.concatenate([labels for _, labels in batches])[:, 0]
    np.savez(path.with_suffix(".npz"), **found)


def write(path: Path) -> None:
    """Store the small pictures raw and the others as JPEG."""
    fields = {
        "image": RGBImageField(write_mode="smart", smart_threshold=20 * 28 * 3, jpeg_quality=90),
        "label": IntField(),
    }
    writer = DatasetWriter(str(path), fields, num_workers=1, page_size=1 << 21)
    writer.from_indexed_dataset(Pictures(), chunksize=5)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(folder / "theirs.beton")
    for path in sorted(folder.glob("*.beton")):
        read(path)
