"""Compiled pixel operations after the crop: colours, CutOut, normalisation."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from ..native.compiling import jit

BRIGHTNESS, CONTRAST, SATURATION = 0, 1, 2

# The six orders of three operations, four bits each: order k applies (ORDERS[k] >> 8, >> 4, >> 0) & 15.
_ORDERS = np.array([0x012, 0x021, 0x102, 0x120, 0x201, 0x210], dtype=np.int64)


@nb.njit(nogil=True)
def _grey(r: Any, g: Any, b: Any) -> Any:
    """Pillow's conversion to L: ITU-R 601-2 luma in 16 bits of fraction."""
    return (19595 * nb.int64(r) + 38470 * nb.int64(g) + 7471 * nb.int64(b) + 0x8000) >> 16


@nb.njit(nogil=True)
def _blend(base: Any, value: Any, factor: Any) -> Any:
    """Pillow's `Image.blend` of one level: clipped to 0–255, and truncated, not rounded."""
    mixed = np.float32(base) + factor * (np.float32(value) - np.float32(base))
    return np.uint8(min(max(mixed, np.float32(0)), np.float32(255)))


@nb.njit(nogil=True)
def _adjust(image: Any, what: Any, factor: Any) -> None:
    """Blend `image` `(side, side, 3)` with black, with its mean grey, or with its own grey values."""
    height, width = image.shape[0], image.shape[1]
    mean = 0
    if what == CONTRAST:
        for y in range(height):
            for x in range(width):
                mean += _grey(image[y, x, 0], image[y, x, 1], image[y, x, 2])
        mean = nb.int64(mean / (height * width) + 0.5)
    for y in range(height):
        for x in range(width):
            base = mean
            if what == SATURATION:
                base = _grey(image[y, x, 0], image[y, x, 1], image[y, x, 2])
            for c in range(3):
                image[y, x, c] = _blend(base, image[y, x, c], factor)


@jit(nb.void(nb.uint8[:, :, :, ::1], nb.float64[:, ::1]))
def jitter_color(images: Any, factors: Any) -> None:
    """torchvision's `ColorJitter` on `(n, side, side, 3)`, in place, with Pillow's arithmetic.

    `factors` `(n, 4)`: of brightness, contrast and saturation, and the index of their order, one of six.
    """
    for i in range(len(images)):
        order = _ORDERS[nb.int64(factors[i, 3])]
        for place in (8, 4, 0):
            what = (order >> place) & 15
            factor = np.float32(factors[i, what])
            if factor != 1:
                _adjust(images[i], what, factor)


@jit(nb.void(nb.uint8[:, :, :, ::1], nb.int64[:, ::1], nb.int64, nb.int64[::1]))
def cut_out(images: Any, corners: Any, side: Any, fill: Any) -> None:
    """Fill the square at `corners` `(n, 2)` of each image with the colour `fill` `(3,)`, in place."""
    for i in range(len(images)):
        top, left = corners[i, 0], corners[i, 1]
        for y in range(top, top + side):
            for x in range(left, left + side):
                for c in range(3):
                    images[i, y, x, c] = np.uint8(fill[c])


@jit(nb.void(nb.uint8[:, :, :, ::1], nb.float32[:, ::1], nb.float32[:, :, :, ::1]))
def normalise(images: Any, line: Any, floats: Any) -> None:
    """Write `pixel · line[0] + line[1]` to `floats`; `line` `(2, 3 · side)` repeats the channels' numbers."""
    width = images.shape[2] * 3
    for i in range(len(images)):
        levels, values = images[i].reshape(-1, width), floats[i].reshape(-1, width)
        for y in range(levels.shape[0]):
            for x in range(width):
                values[y, x] = np.float32(levels[y, x]) * line[0, x] + line[1, x]


@jit(nb.void(nb.uint8[:, :, :, ::1], nb.uint16[:, ::1], nb.uint16[:, :, :, ::1]))
def look_up(images: Any, table: Any, values: Any) -> None:
    """Write each level's entry in its channel's row of `table` `(3, 256)`: bfloat16, which numba lacks."""
    for i in range(len(images)):
        for y in range(images.shape[1]):
            for x in range(images.shape[2]):
                for c in range(3):
                    values[i, y, x, c] = table[c, images[i, y, x, c]]
