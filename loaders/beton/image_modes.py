"""Images of one, three or four channels with 8 or 16 bits: Pillow's names for them, and their pixels as arrays."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ...common.errors import DataError

MODES = {"L": (1, 8), "RGB": (3, 8), "RGBA": (4, 8), "I;16": (1, 16), "RGB;16": (3, 16), "RGBA;16": (4, 16)}
"""Maps Pillow's name of an image's mode, or of its raw pixels, to the number of channels and the bits of each value."""

CHANNELS = (1, 3, 4)
RGB = (3, 8)  # channels and bits of the usual images


def channels_text(channels: int, depth: int) -> str:
    return f"{channels} channel{'s' * (channels > 1)} of {depth} bits"


def mode_of(channels: int, depth: int) -> str:
    return next(name for name, kind in MODES.items() if kind == (channels, depth))


def is_wide(image: Image.Image) -> bool:
    """Whether an image has more than 8 bits per value; of one that is not loaded yet, also if Pillow will drop some."""
    if image.mode.startswith(("I", "F")):
        return True
    for tile in getattr(image, "tile", ()):
        arguments = tile[3]
        raw = str(arguments[0] if isinstance(arguments, tuple | list) and arguments else arguments)
        if ";16" in raw and not raw.startswith("BGR"):  # "BGR;16" are 16 bits for all three
            return True
    return False


def image_pixels(image: Any, mode: str, wide: bool | None = None) -> tuple[NDArray[Any], str]:
    """Return an image's pixels, `(H, W)` or `(H, W, C)` of uint8 or little-endian uint16, and what was done to it.
    `wide`: of a Pillow image that was loaded, what `is_wide` returned before."""
    channels, depth = MODES[mode]  # 8-bit channels are converted to these; bits are never dropped or added
    if isinstance(image, Image.Image):
        if (is_wide(image) if wide is None else wide) != (depth == 16):
            bits = "8 bits" if depth == 16 else "more than 8 bits"
            raise DataError(f"its values have {bits} (Pillow's mode {image.mode}), but {mode!r} has {depth}")
        return _pillow_pixels(image, mode)
    array: Any = image if isinstance(image, torch.Tensor) else np.asarray(image)
    kind = str(array.dtype).removeprefix("torch.")
    if kind != f"uint{depth}":
        raise DataError(f"its pixels are {kind}, but {mode!r} has uint{depth}")
    if isinstance(array, torch.Tensor):  # not before: NumPy lacks some types, such as bfloat16
        array = array.detach().cpu().numpy()
    if array.ndim == 3 and array.shape[0] in CHANNELS and array.shape[2] not in CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    given = 1 if array.ndim == 2 else array.shape[-1]
    if array.ndim not in (2, 3) or given not in CHANNELS or 0 in array.shape:
        raise DataError(f"its shape is {array.shape}; expected (H, W), (H, W, C) or (C, H, W) with C = 1, 3 or 4")
    if given != channels:
        if depth == 16:
            raise DataError(f"it has {given} channels of 16 bits, but {mode!r} has {channels}")
        return _pillow_pixels(Image.fromarray(np.ascontiguousarray(array)), mode)
    return np.ascontiguousarray(array, dtype=f"<u{depth // 8}"), "stored"


def _pillow_pixels(image: Image.Image, mode: str) -> tuple[NDArray[Any], str]:
    if mode in Image.MODES and mode != "I;16":
        converted = image if image.mode == mode else image.convert(mode)
        return np.asarray(converted), "stored" if converted is image else f"converted from {image.mode}"
    if mode != "I;16" or image.mode.startswith("F"):
        raise DataError(f"Pillow's mode {image.mode} is not {mode!r}; pass an array of uint16")
    levels = np.asarray(image)
    if levels.min() < 0 or levels.max() > 0xFFFF:
        raise DataError(f"its pixels (mode {image.mode}) are not in 0 to 65535")
    return levels.astype("<u2"), "stored"
