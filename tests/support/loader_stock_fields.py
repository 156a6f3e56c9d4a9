"""Stock FFCV with every kind of field, in a process of its own, as in `loader_stock_ffcv.py`.

Called with a folder, it makes `theirs.beton` there with its DatasetWriter, then reads every `.beton` of the
folder through both of its memory managers with its own decoders, and saves what they give as `.npz`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import BytesField, FloatField, IntField, JSONField, NDArrayField, RGBImageField
from ffcv.fields.basics import FloatDecoder, IntDecoder
from ffcv.fields.bytes import BytesDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.reader import Reader
from ffcv.writer import DatasetWriter
from loader_pictures import picture

COUNT = 7
DECODERS: dict[type, Any] = {
    IntField: IntDecoder,
    FloatField: FloatDecoder,
    BytesField: BytesDecoder,
    JSONField: BytesDecoder,
    NDArrayField: NDArrayDecoder,
    RGBImageField: lambda: CenterCropRGBImageDecoder((16, 16), ratio=1.0),
}


def values(index: int) -> dict[str, Any]:
    """The fields of a sample other than its image, each of a different kind."""
    index = int(index)  # FFCV gives numpy's, which would widen the array
    return {
        "label": np.arange(index, index + 3, dtype=np.float32) / 4,
        "score": index / 8,
        "rank": index * 1_000_000_007 * 1_000,
        "box": np.arange(6, dtype=np.int16).reshape(2, 3) * (index + 1),
        "text": bytes(range(65, 66 + index)),
        "meta": {"name": f"größe {index}", "tags": [index, None, True]},
    }


class Samples:
    """Pictures with these fields, in their order."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        further = values(index)
        further["text"] = np.frombuffer(further["text"], np.uint8)
        return picture(index, 20, 24), *further.values()


def write(path: Path) -> None:
    fields = {
        "image": RGBImageField(write_mode="raw"),
        "label": NDArrayField(np.dtype("float32"), (3,)),
        "score": FloatField(),
        "rank": IntField(),
        "box": NDArrayField(np.dtype("int16"), (2, 3)),
        "text": BytesField(),
        "meta": JSONField(),
    }
    writer = DatasetWriter(str(path), fields, num_workers=2, page_size=1 << 21)
    writer.from_indexed_dataset(Samples(), chunksize=3)


def read(path: Path, os_cache: bool) -> None:
    """Save each field of all samples under its name; JSON as text."""
    reader = Reader(str(path))
    loader = Loader(
        str(path), batch_size=3, num_workers=1, order=OrderOption.SEQUENTIAL, drop_last=False, os_cache=os_cache,
        pipelines={name: [DECODERS[type(field)]()] for name, field in reader.handlers.items()},
    )  # fmt: skip
    batches = [[part.copy() for part in batch] for batch in loader]
    found = {}
    for name, parts in zip(reader.handlers, zip(*batches, strict=True), strict=True):
        field = reader.handlers[name]
        if name == "meta":  # read back, FFCV takes it for a BytesField
            found[name] = np.array([json.dumps(value) for part in parts for value in JSONField.unpack(part)])
        else:
            found[name] = np.concatenate(parts)
        if isinstance(field, IntField | FloatField):
            found[name] = found[name][:, 0]
    np.savez(path.with_name(f"{path.stem}-{os_cache}.npz"), **found)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(folder / "theirs.beton")
    for path in sorted(folder.glob("*.beton")):
        for os_cache in (True, False):
            read(path, os_cache)
