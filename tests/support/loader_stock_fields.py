"""Stock FFCV with every kind of field, in a process of its own, as in `loader_stock_ffcv.py`.

Called with a folder, it makes `theirs.beton` there with its DatasetWriter, then reads every `.beton` of the
folder through both of its memory managers with its own decoders, and saves what they give as `.npz`.
"""

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
from ffcv.reader import Reader
from field_values import COUNT, sample
from loader_stock_ffcv import Samples, batches, write

DECODERS: dict[type, Any] = {
    IntField: IntDecoder,
    FloatField: FloatDecoder,
    BytesField: BytesDecoder,
    JSONField: BytesDecoder,
    NDArrayField: NDArrayDecoder,
    RGBImageField: lambda: CenterCropRGBImageDecoder((16, 16), ratio=1.0),
}


FIELDS = {
    "image": RGBImageField(write_mode="raw"), "label": NDArrayField(np.dtype("float32"), (3,)), "score": FloatField(),
    "rank": IntField(), "box": NDArrayField(np.dtype("int16"), (2, 3)), "text": BytesField(), "meta": JSONField(),
}  # fmt: skip


def read(path: Path, os_cache: bool) -> None:
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


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(folder / "theirs.beton", Samples(COUNT, sample), workers=2, **FIELDS)
    for path in sorted(folder.glob("*.beton")):
        for os_cache in (True, False):
            read(path, os_cache)
