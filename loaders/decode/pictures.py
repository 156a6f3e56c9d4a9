"""Pictures in any form, as upright pixels: what `convert` stores, and what evaluation and prediction see."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ...common.errors import DataError
from ..beton.image_modes import image_pixels, is_wide
from ..native import jpegs

JPEG_FORMATS = ("JPEG", "MPO")  # MPO is a JPEG followed by further pictures (depth, …), which decoders ignore
LONGEST = 0xFFFF  # side of a picture, in pixels: the format's limit
LONGEST_JPEG = 65_500  # side of a JPEG: libjpeg's limit
_OF_16_BITS = ("PNG", "PPM")  # formats whose values Pillow widens to mode I

_ORIENTATION = 0x0112
_TURNS: dict[Any, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
"""Maps EXIF's orientation to the operation that undoes it; 1 is upright."""


class UnreadableError(DataError):
    """An image file that cannot be read."""


@contextmanager
def reading() -> Iterator[None]:
    """Raise what an unusable image file makes Pillow raise in the block as UnreadableError, with the reason."""
    try:
        yield
    except UnidentifiedImageError:
        raise UnreadableError("it is not an image that Pillow can read") from None
    except (DataError, MemoryError):
        raise
    except Exception as error:  # damaged files make Pillow's readers raise many types
        raise UnreadableError(f"it cannot be decoded: {error}") from error


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return the operation that makes the image upright by its EXIF data; None if it is upright. If the EXIF data is
    damaged or has an invalid orientation, viewers show the picture as stored."""
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION))
    except Exception:  # damaged data makes Pillow's reader raise many types
        return None


def upright(image: Image.Image) -> Image.Image:
    """Return the image upright by its EXIF data, which a turned one no longer has."""
    turn = turn_of(image)
    if turn is None:
        return image
    turned = image.transpose(turn)
    turned.info = {}
    return turned


def to_rgb(image: Image.Image) -> tuple[Image.Image, str]:
    """Return an upright RGB copy of a decoded image, and what was done to it."""
    turned = upright(image)
    treatment = "stored" if turned is image else "rotated upright (EXIF)"
    if turned.mode == "RGB":
        return turned, treatment
    if turned.mode.startswith("F"):
        raise DataError("its pixels are floats (mode F); convert them to uint8 or uint16 first")
    if turned.mode.startswith("I"):  # 16 bits per pixel; Pillow's own conversion would clip at 255
        values = np.asarray(turned).astype(np.int64)
        if turned.mode == "I" and image.format not in _OF_16_BITS and 0 < values.max() <= 255:
            raise DataError("its pixels (mode I, 32 bits) are at most 255; convert them to uint8 or uint16 first")
        levels = values >> 8
        if levels.min() < 0 or levels.max() > 255:
            raise DataError(f"its pixels (mode {turned.mode}) are not in 0 to 65535")
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB"), "converted from 16 bits"
    return turned.convert("RGB"), f"converted from {turned.mode}"


@contextmanager
def decoded(picture: bytes) -> Iterator[tuple[Image.Image, bool]]:
    """Decode an image file, also an arithmetic JPEG; yield the image, and whether its file has more than 8 bits. What
    makes it unreadable, also in the block, is a DataError with the reason."""
    with reading():
        with Image.open(io.BytesIO(picture)) as opened:
            if opened.format == "EPS":  # a program, and files may come from anywhere
                raise UnreadableError("it is PostScript (EPS), which Pillow would run in Ghostscript; save it as PNG")
            wide, exif = is_wide(opened), opened.info.get("exif")
            data = jpegs.huffman_coded(picture) if opened.format in JPEG_FORMATS else picture
            if data is picture:
                opened.load()
                yield opened, wide
                return
        with Image.open(io.BytesIO(data)) as opened:
            opened.load()
            if exif is not None:  # which the recoded file lacks: it may turn the picture
                opened.info["exif"] = exif
            yield opened, wide


def rgb_of(image: Image.Image) -> Image.Image:
    """Return an upright RGB image; at once if it is one, and has no data beside its pixels."""
    if image.mode == "RGB" and not image.info and type(image) is Image.Image:
        return image
    return to_rgb(image)[0]


def pixels_of(picture: Any, mode: str) -> tuple[NDArray[Any], str]:
    """Return the pixels of a picture (bytes of a file, PIL image, array or tensor), upright, `(H, W)` or `(H, W, C)`,
    and what was done to it. `mode` is a key of `MODES`: RGB is made of any image; otherwise as `image_pixels`."""
    if isinstance(picture, bytes):
        with decoded(picture) as (image, wide):
            return _pixels(image, mode, wide)
    if isinstance(picture, Image.Image):
        with reading():
            wide = is_wide(picture)
            picture.load()
            return _pixels(picture, mode, wide)
    return image_pixels(picture, mode)


def _pixels(image: Image.Image, mode: str, wide: bool) -> tuple[NDArray[Any], str]:
    if mode == "RGB":
        picture, treatment = to_rgb(image)
        return np.asarray(picture), treatment
    turned = upright(image)
    pixels, treatment = image_pixels(turned, mode, wide)
    return pixels, "rotated upright (EXIF)" if turned is not image and treatment == "stored" else treatment
