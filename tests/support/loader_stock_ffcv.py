"""Stock FFCV at work, in a process of its own: importing it changes thread counts and prints noise.

Called with a folder, it makes `theirs.beton` there with its DatasetWriter, then reads every `.beton` of the
folder with its Loader, and saves the result as `.npz` next to it. `loader_stock_*.py` do so with other fields.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.writer import DatasetWriter
from loader_pictures import picture


class Samples:
    def __init__(self, count: int, make: Callable[[int], tuple[Any, ...]]) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.make(int(index))  # FFCV gives numpy's, which would widen arrays


def write(path: Path, samples: Samples, workers: int = 1, **fields: Any) -> None:
    writer = DatasetWriter(str(path), fields, num_workers=workers, page_size=1 << 21)
    writer.from_indexed_dataset(samples, chunksize=3)


def batches(path: Path, pipelines: Any, batch_size: int = 3, **options: Any) -> list[list[Any]]:
    """Copies of all batches, in the file's order."""
    loader = Loader(
        str(path), batch_size=batch_size, num_workers=1, order=OrderOption.SEQUENTIAL, drop_last=False,
        pipelines=pipelines, **options,
    )  # fmt: skip
    return [[part.copy() for part in batch] for batch in loader]


def small_and_large(index: int) -> tuple[Any, int]:
    """The first four of ten pictures are small; DatasetWriter stores images other than JPEGs according to its mode."""
    side = 20 if index < 4 else 64
    return picture(index, side, side + 4 * (index % 3)), index * index


def read(path: Path) -> None:
    """Save `crop`, the central squares of 32 pixels, and `labels`; `whole` images if all are of one size."""
    found: dict[str, Any] = {}
    decoders = {"crop": CenterCropRGBImageDecoder((32, 32), ratio=1.0)}
    if path.stem == "raw":
        decoders["whole"] = SimpleRGBImageDecoder()
    for name, decoder in decoders.items():
        pipelines = {"image": [decoder], "label": [IntDecoder()]}
        images, labels = zip(*batches(path, pipelines, batch_size=4), strict=True)
        found |= {name: np.concatenate(images), "labels": np.concatenate(labels)[:, 0]}
    np.savez(path.with_suffix(".npz"), **found)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    smart = RGBImageField(write_mode="smart", smart_threshold=20 * 28 * 3, jpeg_quality=90)  # small ones raw
    write(folder / "theirs.beton", Samples(10, small_and_large), image=smart, label=IntField())
    for path in sorted(folder.glob("*.beton")):
        read(path)
