"""Stock FFCV at work, in a process of its own: importing it changes thread counts and prints noise.

    loader_stock_ffcv.py images|fields|arrays|masks FOLDER

With its DatasetWriter it makes `theirs.beton` in the folder, of pictures, or with every kind of field, or of a mask
as a PNG in bytes; of images in ndarray fields, `theirs-*.beton` for each shape and type. Then it reads every `.beton`
of the folder with its own decoders, and saves what they give as `.npz`: fields through both of its memory managers,
and of masks the indices, decoded by Pillow, and the boxes.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import BytesField, FloatField, IntField, JSONField, NDArrayField, RGBImageField
from ffcv.fields.basics import FloatDecoder, IntDecoder
from ffcv.fields.bytes import BytesDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.reader import Reader
from ffcv.writer import DatasetWriter
from loader_pictures import picture
from numpy.typing import NDArray
from PIL import Image

COUNT, MASKS = 7, 5  # samples with fields or arrays, and with masks


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


def batches(
    path: Path, pipelines: dict[str, Any], batch_size: int = 3, **options: Any
) -> list[list[NDArray[Any]]]:
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


def read_images(path: Path) -> None:
    """Save `crop`, the central squares of 32 pixels, and `labels`; `whole` images if all are of one size."""
    found: dict[str, Any] = {}
    decoders = {"crop": CenterCropRGBImageDecoder((32, 32), ratio=1.0)}
    if path.stem == "raw":
        decoders["whole"] = SimpleRGBImageDecoder()
    for name, decoder in decoders.items():
        images, labels = zip(
            *batches(path, {"image": [decoder], "label": [IntDecoder()]}, batch_size=4), strict=True
        )
        found |= {name: np.concatenate(images), "labels": np.concatenate(labels)[:, 0]}
    np.savez(path.with_suffix(".npz"), **found)


DECODERS: dict[type, Any] = {
    IntField: IntDecoder, FloatField: FloatDecoder, BytesField: BytesDecoder, JSONField: BytesDecoder,
    NDArrayField: NDArrayDecoder, RGBImageField: lambda: CenterCropRGBImageDecoder((16, 16), ratio=1.0),
}  # fmt: skip


def values(index: int) -> dict[str, Any]:
    """The fields of a sample other than its image, each of a different kind."""
    return {
        "label": np.arange(index, index + 3, dtype=np.float32) / 4,
        "score": index / 8,
        "rank": index * 1_000_000_007 * 1_000,
        "box": np.arange(6, dtype=np.int16).reshape(2, 3) * (index + 1),
        "text": bytes(range(65, 66 + index)),
        "meta": {"name": f"größe {index}", "tags": [index, None, True]},
    }


def sample(index: int) -> tuple[Any, ...]:
    further = values(index)
    further["text"] = np.frombuffer(further["text"], np.uint8)
    return picture(index, 20, 24), *further.values()


FIELDS = {
    "image": RGBImageField(write_mode="raw"), "label": NDArrayField(np.dtype("float32"), (3,)), "score": FloatField(),
    "rank": IntField(), "box": NDArrayField(np.dtype("int16"), (2, 3)), "text": BytesField(), "meta": JSONField(),
}  # fmt: skip


def read_fields(path: Path) -> None:
    for os_cache in (True, False):
        _read_fields(path, os_cache)


def _read_fields(path: Path, os_cache: bool) -> None:
    """Save each field of all samples under its name; JSON as text."""
    handlers = Reader(str(path)).handlers
    pipelines = {name: [DECODERS[type(field)]()] for name, field in handlers.items()}
    found = {}
    columns = zip(*batches(path, pipelines, os_cache=os_cache), strict=True)
    for (name, field), parts in zip(handlers.items(), columns, strict=True):
        if name == "meta":  # read back, FFCV takes it for a BytesField
            found[name] = np.array([json.dumps(value) for part in parts for value in JSONField.unpack(part)])
        else:
            found[name] = np.concatenate(parts)
        if isinstance(field, IntField | FloatField):
            found[name] = found[name][:, 0]
    np.savez(path.with_name(f"{path.stem}-{os_cache}.npz"), **found)


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


def size(index: int) -> tuple[int, int]:
    return 40 + 7 * index, 60 - 5 * index


def mask(index: int) -> NDArray[np.uint8]:
    """A mask with the classes 0 to 2, and 255."""
    height, width = size(index)
    indices = np.zeros((height, width), np.uint8)
    indices[5 + index : 20, 3:30] = 1
    indices[15:33, 20:25] = 2
    indices[30:, -8:] = 255
    return indices


def pair(index: int) -> tuple[Any, Any]:
    buffer = io.BytesIO()
    Image.fromarray(mask(index)).save(buffer, "PNG")
    return picture(index, *size(index)), np.frombuffer(buffer.getvalue(), np.uint8)


def read_masks(path: Path) -> None:
    names = list(Reader(str(path)).handlers)
    pipelines: Any = {name: [BytesDecoder()] for name in names}
    pipelines["image"] = [CenterCropRGBImageDecoder((16, 16), ratio=1.0)]
    found: dict[str, Any] = {}
    read = batches(path, pipelines, batch_size=2)
    for index, sample in enumerate(one for batch in read for one in zip(*batch, strict=True)):
        for name, value in zip(names, sample, strict=True):
            if name == "boxes":
                found[f"boxes{index}"] = np.array(JSONField.unpack(value[None])[0])
            elif name != "image":
                with Image.open(io.BytesIO(value.tobytes())) as image:  # padded with zeros to the longest
                    found[f"{name}{index}"] = np.asarray(image)
    np.savez(path.with_suffix(".npz"), **found)


def read_arrays(path: Path) -> None:
    parts = zip(*batches(path, {"image": [NDArrayDecoder()], "label": [IntDecoder()]}), strict=True)
    images, labels = map(np.concatenate, parts)
    np.savez(path.with_suffix(".npz"), images=images, labels=labels[:, 0])


def write_all(kind: str, folder: Path) -> None:
    theirs = folder / "theirs.beton"
    if kind == "fields":
        write(theirs, Samples(COUNT, sample), workers=2, **FIELDS)
    elif kind == "masks":
        image, text = RGBImageField(write_mode="raw"), BytesField()
        write(theirs, Samples(MASKS, pair), workers=2, image=image, mask=text)
    elif kind == "images":  # small ones raw
        smart = RGBImageField(write_mode="smart", smart_threshold=20 * 28 * 3, jpeg_quality=90)
        write(theirs, Samples(10, small_and_large), image=smart, label=IntField())
    else:
        for name, (dtype, shape) in KINDS.items():
            samples = Samples(COUNT, list(zip(pixels(name), range(COUNT), strict=True)).__getitem__)
            image = NDArrayField(np.dtype(dtype), shape)
            write(folder / f"theirs-{name}.beton", samples, image=image, label=IntField())


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    write_all(kind, folder)
    readers = {"images": read_images, "fields": read_fields, "arrays": read_arrays, "masks": read_masks}
    for path in sorted(folder.glob("*.beton")):
        readers[kind](path)
