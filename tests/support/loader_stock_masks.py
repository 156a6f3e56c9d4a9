"""Stock FFCV with masks as bytes, in a process of its own, as in `loader_stock_ffcv.py`.

Called with a folder, it makes `theirs.beton` there with its DatasetWriter, whose only fields are an image and a PNG,
then reads every `.beton` of the folder with its own decoders, and saves each sample's mask, decoded by Pillow, and
its boxes as `.npz`.
"""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ffcv.fields import BytesField, JSONField, RGBImageField
from ffcv.fields.bytes import BytesDecoder
from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
from ffcv.reader import Reader
from loader_pictures import file_bytes, picture
from loader_stock_ffcv import Samples, batches, write
from numpy.typing import NDArray
from PIL import Image

COUNT = 5


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
    return picture(index, *size(index)), np.frombuffer(file_bytes(mask(index), "PNG"), np.uint8)


def read(path: Path) -> None:
    names = list(Reader(str(path)).handlers)
    pipelines: Any = {name: [BytesDecoder()] for name in names}
    pipelines["image"] = [CenterCropRGBImageDecoder((16, 16), ratio=1.0)]
    read: dict[str, Any] = {}
    found = batches(path, pipelines, batch_size=2)
    for index, sample in enumerate(sample for batch in found for sample in zip(*batch, strict=True)):
        for name, value in zip(names, sample, strict=True):
            if name == "boxes":
                read[f"boxes{index}"] = np.array(JSONField.unpack(value[None])[0])
            elif name != "image":
                with Image.open(io.BytesIO(value.tobytes())) as image:  # padded with zeros to the longest
                    read[f"{name}{index}"] = np.asarray(image)
    np.savez(path.with_suffix(".npz"), **read)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    image, text = RGBImageField(write_mode="raw"), BytesField()
    write(folder / "theirs.beton", Samples(COUNT, pair), workers=2, image=image, mask=text)
    for path in sorted(folder.glob("*.beton")):
        read(path)
