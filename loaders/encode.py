"""One image, in whatever form it comes, to the bytes that a `.beton` stores for it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import DataError
from . import libffcv
from .beton import MODE_JPEG, MODE_RAW

RAW_LIMIT = 64 * 64 * 3
"""Images of at most so many bytes of pixels are stored raw: lossless, and faster to read than a JPEG."""

_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Encoded:
    """An image as stored: `mode` (0 JPEG, 1 raw pixels), size in pixels, bytes, and how it got there."""

    mode: int
    width: int
    height: int
    payload: bytes
    how: str


def encode_image(image: Any, *, max_resolution: int | None, quality: int) -> Encoded:
    """Encodes an image for storage, touching its pixels only where that cannot be avoided.

    Args:
        image: the bytes of an image file; a PIL image; a uint8 array or tensor `(H, W, 3)`,
            `(3, H, W)` or `(H, W)`.
        max_resolution: longest side in pixels; larger images are scaled down. None: no limit.
        quality: JPEG quality 1–100 for what must be encoded.

    A JPEG file that is RGB, upright, within `max_resolution` and readable by the loader's decoder is
    passed through byte for byte. Small images that are not JPEGs are stored as raw pixels.

    Raises:
        DataError: if the image cannot be read, with the reason.
    """
    if isinstance(image, bytes):
        return _encode_file(image, max_resolution, quality)
    if isinstance(image, Image.Image):
        return _encode_pil(image, max_resolution, quality)
    return _store(Image.fromarray(_to_array(image)), "stored", max_resolution, quality)


def _encode_file(data: bytes, max_resolution: int | None, quality: int) -> Encoded:
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.format == "JPEG" and image.mode == "RGB":
                width, height = image.size
                upright = image.getexif().get(_ORIENTATION, 1) == 1
                fits = max_resolution is None or max(image.size) <= max_resolution
                if upright and fits and libffcv.decodes(data, width, height):
                    return Encoded(MODE_JPEG, width, height, data, "passed through")
            image.load()
            rgb, how = _to_rgb(image)
            if image.format == "JPEG" and how == "stored" and (max_resolution is None or fits):
                how = "mended: its JPEG decoded with a warning"
            return _store(rgb, how, max_resolution, quality, jpeg=image.format == "JPEG")
    except UnidentifiedImageError:
        raise DataError("it is not an image that Pillow can read") from None
    except DataError:
        raise
    except Exception as error:  # Pillow's readers raise whatever a damaged file leads them to
        raise DataError(f"it cannot be decoded: {error}") from error


def _encode_pil(image: Image.Image, max_resolution: int | None, quality: int) -> Encoded:
    try:
        image.load()  # opened lazily, it may still be damaged
    except Exception as error:
        raise DataError(f"it cannot be decoded: {error}") from error
    return _store(*_to_rgb(image), max_resolution, quality)


def _to_rgb(image: Image.Image) -> tuple[Image.Image, str]:
    """An upright RGB copy of the image, and what had to be done to it."""
    upright = ImageOps.exif_transpose(image)
    how = "stored" if image.getexif().get(_ORIENTATION, 1) == 1 else "turned upright after its EXIF data"
    if upright.mode == "RGB":
        return upright, how
    if upright.mode.startswith("I"):  # 16 bits a pixel; Pillow's own conversion would clip at 255
        levels = np.asarray(upright).astype(np.int64) >> 8
        if levels.min() < 0 or levels.max() > 255:
            raise DataError(f"its pixels (mode {upright.mode}) do not lie from 0 to 65535")
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB"), "converted from 16 bits"
    return upright.convert("RGB"), f"converted from {upright.mode}"


def _to_array(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    array = image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    if array.dtype != np.uint8:
        raise DataError(f"its pixels are {array.dtype}; give uint8, 0 to 255")
    if array.ndim == 3 and array.shape[0] == 3 and array.shape[2] != 3:
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise DataError(f"its shape is {array.shape}; give (H, W, 3), (3, H, W) or (H, W)")
    return np.ascontiguousarray(array)


def _store(
    image: Image.Image, how: str, max_resolution: int | None, quality: int, jpeg: bool = False
) -> Encoded:
    if max_resolution is not None and max(image.size) > max_resolution:
        ratio = max_resolution / max(image.size)
        width, height = (max(round(side * ratio), 1) for side in image.size)
        image, how = image.resize((width, height), Image.Resampling.BOX), "scaled down"
    if max(image.size) > 0xFFFF:
        raise DataError(f"its longest side is {max(image.size)} pixels, the format holds 65535")
    if not jpeg and image.width * image.height * 3 <= RAW_LIMIT:
        return Encoded(MODE_RAW, image.width, image.height, image.tobytes(), how)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Encoded(MODE_JPEG, image.width, image.height, buffer.getvalue(), how)
