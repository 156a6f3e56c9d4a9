"""Stock FFCV with images in ndarray fields, in a process of its own, as in `loader_stock_ffcv.py`.

Called with a folder, it writes a `theirs-*.beton` per shape and type there with its DatasetWriter, then reads every
`.beton` of the folder with its own decoders, and saves what they give as `.npz`.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import IntField, NDArrayField
from ffcv.fields.basics import IntDecoder
from ffcv.fields.ndarray import NDArrayDecoder
from loader_stock_ffcv import Samples, batches, write
from numpy.typing import NDArray

COUNT = 7
KINDS = {
    "gray": ("uint8", (20, 24)), "wide": ("uint16", (20, 24)), "one": ("uint16", (20, 24, 1)),
    "color": ("uint8", (20, 24, 3)), "four": ("uint16", (20, 24, 4)),
}  # fmt: skip


def pixels(name: str) -> NDArray[Any]:
    """The images of one kind, `(COUNT, H, W)` or `(COUNT, H, W, C)`."""
    dtype, shape = KINDS[name]
    values = np.random.default_rng(len(name)).integers(0, np.iinfo(dtype).max + 1, (COUNT, *shape))
    return values.astype(dtype)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, (dtype, shape) in KINDS.items():
        pairs = list(zip(pixels(name), range(COUNT), strict=True))
        image = NDArrayField(np.dtype(dtype), shape)
        samples = Samples(COUNT, pairs.__getitem__)
        write(folder / f"theirs-{name}.beton", samples, image=image, label=IntField())
    for path in sorted(folder.glob("*.beton")):
        parts = zip(*batches(path, {"image": [NDArrayDecoder()], "label": [IntDecoder()]}), strict=True)
        images, labels = map(np.concatenate, parts)
        np.savez(path.with_suffix(".npz"), images=images, labels=labels[:, 0])
