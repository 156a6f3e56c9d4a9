"""The compiled inner loop: read a sample, decode, crop, flip, and write it into the batch.

One function serves every loader, with all settings as arguments, so that it is compiled once (and
kept in numba's cache on disk) instead of once per loader. It runs without the GIL in the loader's own
threads. Randomness is a pure function of (seed, epoch, sample index): nothing depends on the thread,
the batch or the rank that handles a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from numba import types

from . import libffcv

OK, UNDECODABLE, WRONG_SIZE = 0, 1, 2
CENTER, RANDOM_RESIZED, PADDED = 0, 1, 2

# No argument is a writable one-dimensional uint8 array, and none is made: a stock `ffcv.Loader` in the same
# process declares that very type, which numba shares, to be read-only (os_cache.py, `state_type`).
# Every argument of the C functions as int64: the callee reads the low bits of its register or stack slot.
_IMDECODE = types.int32(*[types.int64] * 13)
_RESIZE = types.void(*[types.int64] * 11)


def _jit(signature: Any) -> Callable[[Any], Any]:
    """Compiles without the GIL, keeping the result in numba's cache where that can be written."""

    def decorate(function: Any) -> Any:
        try:
            return nb.njit(signature, cache=True, nogil=True)(function)
        except (RuntimeError, OSError):  # no folder can be written, or the disk is full
            return nb.njit(signature, nogil=True)(function)

    return decorate


class CFunction(types.WrapperAddressProtocol):
    """A C function as an argument of compiled code; captured as a constant it would forbid caching."""

    def __init__(self, name: str, signature: Any) -> None:
        self._address, self._signature = libffcv.address(name), signature

    def __wrapper_address__(self) -> int:
        return self._address

    def signature(self) -> Any:
        return self._signature


def functions() -> tuple[CFunction, CFunction]:
    """`imdecode` and `resize` of FFCV's library, the first two arguments of `load_samples`."""
    return CFunction("imdecode", _IMDECODE), CFunction("resize", _RESIZE)


@_jit(nb.uint64(nb.uint64))
def _mix(x: Any) -> Any:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection that avalanches."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_jit(nb.uint64(nb.uint64, nb.uint64, nb.uint64))
def sample_key(seed: Any, epoch: Any, index: Any) -> Any:
    """The key of all random draws for one sample in one epoch."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = _mix(seed + golden)
    key = _mix(key ^ (epoch + golden))
    return _mix(key ^ (index + golden))


@_jit(nb.float64(nb.uint64, nb.int64))
def uniform(key: Any, draw: Any) -> Any:
    """The `draw`-th uniform number in [0, 1) of a key."""
    bits = _mix(key + np.uint64(draw + 1) * np.uint64(0x9E3779B97F4A7C15))
    return np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@_jit("UniTuple(int64, 2)(Array(uint8, 1, 'C', readonly=True))")
def jpeg_size(data: Any) -> Any:
    """(height, width) from a JPEG's frame header; (0, 0) if there is none."""
    at = 2
    while at + 9 < len(data):
        if data[at] != 0xFF:
            return 0, 0
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            height = (nb.int64(data[at + 5]) << 8) + data[at + 6]
            width = (nb.int64(data[at + 7]) << 8) + data[at + 8]
            return height, width
        at += 2 + (nb.int64(data[at + 2]) << 8) + data[at + 3]
    return 0, 0


@_jit("UniTuple(int64, 4)(uint64, int64, int64, float64[::1], float64[::1])")
def random_resized_crop(key: Any, height: Any, width: Any, scale: Any, ratio: Any) -> Any:
    """(top, left, height, width) of Inception's crop; ten tries, then the centre.

    The same distribution as torchvision's `RandomResizedCrop.get_params`. Draws 0 to 39 of the key.
    """
    low, high = np.log(ratio[0]), np.log(ratio[1])
    for attempt in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform(key, 4 * attempt))
        aspect = np.exp(low + (high - low) * uniform(key, 4 * attempt + 1))
        w = nb.int64(round(np.sqrt(area * aspect)))
        h = nb.int64(round(np.sqrt(area / aspect)))
        if 0 < w <= width and 0 < h <= height:
            top = nb.int64(uniform(key, 4 * attempt + 2) * (height - h + 1))
            left = nb.int64(uniform(key, 4 * attempt + 3) * (width - w + 1))
            return top, left, h, w
    w, h = width, height
    if width < ratio[0] * height:
        h = max(nb.int64(round(width / ratio[0])), 1)
    elif width > ratio[1] * height:
        w = max(nb.int64(round(height * ratio[1])), 1)
    return (height - h) // 2, (width - w) // 2, h, w


@_jit(nb.void(nb.uint8[:, ::1], nb.int64, nb.int64, nb.uint8[:, :, ::1]))
def shifted_copy(scratch: Any, down: Any, right: Any, target: Any) -> None:
    """Copies the image in `scratch` `(1, bytes)`, of the target's size, moved by up to `down`, `right` pixels.

    Edges are reflected.
    """
    height, width = target.shape[0], target.shape[1]
    for y in range(height):
        from_y = abs(y - down)
        from_y = 2 * (height - 1) - from_y if from_y >= height else from_y
        for x in range(width):
            from_x = abs(x - right)
            from_x = 2 * (width - 1) - from_x if from_x >= width else from_x
            at = (from_y * width + from_x) * 3
            for c in range(3):
                target[y, x, c] = scratch[0, at + c]


@_jit(nb.void(nb.uint8[:, :, ::1]))
def flip(image: Any) -> None:
    """Mirrors an image left to right, in place."""
    height, width = image.shape[0], image.shape[1]
    for y in range(height):
        for x in range(width // 2):
            for c in range(3):
                other = image[y, width - 1 - x, c]
                image[y, width - 1 - x, c] = image[y, x, c]
                image[y, x, c] = other


@nb.njit(nogil=True)
def _fetch(imdecode: Any, stored: Any, mode: Any, height: Any, width: Any, scratch: Any) -> Any:
    """Puts a sample's pixels, `height · width · 3` bytes, at the start of `scratch` `(1, bytes)`; its status."""
    if mode != 0:
        for k in range(len(stored)):
            scratch[0, k] = stored[k]
        return OK
    found = jpeg_size(stored)
    if found[0] != height or found[1] != width:
        return WRONG_SIZE
    code = imdecode(
        nb.int64(stored.ctypes.data), len(stored), height, width, nb.int64(scratch.ctypes.data),
        height, width, 0, 0, 1, 1, 0, 0,
    )  # fmt: skip
    return OK if code == 0 else UNDECODABLE


@nb.njit(nogil=True)
def _crop(
    resize: Any,
    scratch: Any,
    height: Any,
    width: Any,
    key: Any,
    crop: Any,
    scale: Any,
    ratio: Any,
    target: Any,
) -> None:
    """Writes the crop of the image in `scratch` to `target` `(H, W, 3)`. Draws 0 to 39 of the key."""
    if crop == PADDED:
        reach = nb.int64(scale[0])
        down = nb.int64(uniform(key, 0) * (2 * reach + 1)) - reach
        right = nb.int64(uniform(key, 1) * (2 * reach + 1)) - reach
        shifted_copy(scratch, down, right, target)
        return
    if crop == RANDOM_RESIZED:
        top, left, h, w = random_resized_crop(key, height, width, scale, ratio)
    else:
        h = w = max(nb.int64(round(min(height, width) * scale[0])), 1)
        top, left = (height - h) // 2, (width - w) // 2
    resize(
        0, nb.int64(scratch.ctypes.data), height, width, top, top + h, left, left + w,
        nb.int64(target.ctypes.data), target.shape[0], target.shape[1],
    )  # fmt: skip


@nb.njit(nogil=True)
def _normalise(pixels: Any, table: Any, floats: Any) -> None:
    """Looks each of the pixels `(H, W, 3)` up in its channel's row of `table` `(3, 256)`."""
    for y in range(pixels.shape[0]):
        for x in range(pixels.shape[1]):
            for c in range(3):
                floats[y, x, c] = table[c, pixels[y, x, c]]


_READONLY = types.Array(nb.uint8, 1, "C", readonly=True)
_SIGNATURE = types.void(
    types.FunctionType(_IMDECODE), types.FunctionType(_RESIZE), _READONLY,
    nb.int32[::1], nb.uint16[::1], nb.uint16[::1], nb.uint64[::1], nb.uint64[::1],
    nb.int64[::1], nb.uint64, nb.uint64, nb.int64, nb.float64[::1], nb.float64[::1], nb.float64,
    nb.uint8[:, ::1], nb.uint8[:, :, :, ::1], nb.float32[:, :, :, ::1], nb.float32[:, ::1], nb.int32[::1],
)  # fmt: skip


@_jit(_SIGNATURE)
def load_samples(
    imdecode: Any, resize: Any, data: Any,
    modes: Any, widths: Any, heights: Any, pointers: Any, sizes: Any,
    indices: Any, seed: Any, epoch: Any, crop: Any, scale: Any, ratio: Any, flip_probability: Any,
    scratch: Any, pixels: Any, floats: Any, table: Any, status: Any,
) -> None:  # fmt: skip
    """Loads the samples `indices` into `pixels` `(n, H, W, 3)` and sets their `status`.

    `crop` is CENTER (`scale[0]` is the crop's side over the image's shorter side), RANDOM_RESIZED
    (`scale`, `ratio`), or PADDED (shifted by up to `scale[0]` pixels; the image has the target's size).
    If `floats` is not empty it receives the pixels through `table` `(3, 256)`, the normalised value of
    each channel's 256 levels.
    """
    for i in range(len(indices)):
        index = indices[i]
        height, width = nb.int64(heights[index]), nb.int64(widths[index])
        stored = data[pointers[index] : pointers[index] + sizes[index]]
        status[i] = _fetch(imdecode, stored, modes[index], height, width, scratch)
        if status[i] != OK:
            continue
        key = sample_key(seed, epoch, np.uint64(index))
        _crop(resize, scratch, height, width, key, crop, scale, ratio, pixels[i])
        if uniform(key, 40) < flip_probability:
            flip(pixels[i])
        if len(floats):
            _normalise(pixels[i], table, floats[i])
