"""The compiled operations of the augmentation policies on a chunk's pixels, in place.

Arithmetic is Pillow's: RandAugment and TrivialAugment return exactly torchvision's images for the same draws. For
AugMix torchvision works on tensors with bilinear interpolation, and so does this; its colours are Pillow's, up to 1
level from torchvision's.
"""

from __future__ import annotations

import math
from typing import Any

import numba as nb
import numpy as np

from ..native.compiling import jit

IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE = 0, 1, 2, 3, 4, 5
BRIGHTNESS, COLOR, CONTRAST, SHARPNESS = 6, 7, 8, 9
POSTERIZE, SOLARIZE, AUTO_CONTRAST, EQUALIZE = 10, 11, 12, 13

# _grey and _blend repeat those of pixels.py: compiled functions are not shared between files (compiling.py).


@nb.njit(nogil=True)
def _grey(r: Any, g: Any, b: Any) -> Any:
    return (19595 * nb.int64(r) + 38470 * nb.int64(g) + 7471 * nb.int64(b) + 0x8000) >> 16


@nb.njit(nogil=True)
def _blend(base: Any, value: Any, factor: Any) -> Any:
    mixed = np.float32(base) + factor * (np.float32(value) - np.float32(base))
    return np.uint8(min(max(mixed, np.float32(0)), np.float32(255)))


@nb.njit(nogil=True)
def _source(operation: Any, magnitude: Any, height: Any, width: Any) -> Any:
    """Return (a, b, c, d, e, f): the pixel at (x, y) comes from (a·x + b·y + c, d·x + e·y + f)."""
    if operation == SHEAR_X:
        return 1.0, magnitude, 0.0, 0.0, 1.0, 0.0
    if operation == SHEAR_Y:
        return 1.0, 0.0, 0.0, magnitude, 1.0, 0.0
    if operation == TRANSLATE_X:
        return 1.0, 0.0, -float(int(magnitude)), 0.0, 1.0, 0.0
    if operation == TRANSLATE_Y:
        return 1.0, 0.0, 0.0, 0.0, 1.0, -float(int(magnitude))
    cos, sin = math.cos(math.radians(magnitude)), math.sin(math.radians(magnitude))
    x, y = width / 2, height / 2
    return cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y


@nb.njit(nogil=True)
def _move(image: Any, before: Any, source: Any) -> None:
    """Fill `image` with the nearest pixels of `before`, black outside of it.

    Pillow steps through the source in 16 bits of fraction, from the centre of the first pixel.
    """
    height, width = image.shape[0], image.shape[1]
    a, b, c, d, e, f = source
    to_right_x, to_right_y = math.floor(a * 65536 + 0.5), math.floor(d * 65536 + 0.5)
    down_x, down_y = math.floor(b * 65536 + 0.5), math.floor(e * 65536 + 0.5)
    start_x = math.floor((c + a * 0.5 + b * 0.5) * 65536 + 0.5)
    start_y = math.floor((f + d * 0.5 + e * 0.5) * 65536 + 0.5)
    for y in range(height):
        for x in range(width):
            from_x = (start_x + y * down_x + x * to_right_x) >> 16
            from_y = (start_y + y * down_y + x * to_right_y) >> 16
            if 0 <= from_x < width and 0 <= from_y < height:
                for k in range(3):
                    image[y, x, k] = before[from_y, from_x, k]
            else:
                for k in range(3):
                    image[y, x, k] = 0


@nb.njit(nogil=True)
def _neighbours(at: Any, size: Any) -> Any:
    """Return the two pixels that a position on one axis lies between, and their weights; 0 for one outside."""
    first = math.floor(at)
    share = np.float32(at - first)
    weight = np.float32(1) - share if 0 <= first < size else np.float32(0)
    further = share if 0 <= first + 1 < size else np.float32(0)
    return min(max(first, 0), size - 1), min(max(first + 1, 0), size - 1), weight, further


@nb.njit(nogil=True)
def _move_smoothly(image: Any, before: Any, source: Any) -> None:
    """As `_move`, but bilinear; pixels outside of `before` are black in the interpolation too."""
    height, width = image.shape[0], image.shape[1]
    a, b, c, d, e, f = source
    for y in range(height):
        for x in range(width):
            from_x = a * (x + 0.5) + b * (y + 0.5) + c - 0.5
            from_y = d * (x + 0.5) + e * (y + 0.5) + f - 0.5
            left, right, of_left, of_right = _neighbours(from_x, width)
            top, bottom, of_top, of_bottom = _neighbours(from_y, height)
            for k in range(3):
                upper = of_left * before[top, left, k] + of_right * before[top, right, k]
                lower = of_left * before[bottom, left, k] + of_right * before[bottom, right, k]
                image[y, x, k] = np.uint8(np.rint(of_top * upper + of_bottom * lower))


@nb.njit(nogil=True)
def _saturate(image: Any, factor: Any) -> None:
    """Blend each pixel with its grey value."""
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            grey = _grey(image[y, x, 0], image[y, x, 1], image[y, x, 2])
            for k in range(3):
                image[y, x, k] = _blend(grey, image[y, x, k], factor)


@nb.njit(nogil=True)
def _sharpen(image: Any, before: Any, factor: Any) -> None:
    """Blend each pixel with its smoothed value: itself five times and its 8 neighbours, over 13.

    Edge pixels are unchanged. The smoothed value is rounded; halves do not occur in thirteenths.
    """
    width = image.shape[1] * 3
    lines, old = image.reshape(-1, width), before.reshape(-1, width)  # so that the compiler vectorises
    for y in range(len(lines) - 2):
        for x in range(width - 6):
            total = np.float32(4) * np.float32(old[y + 1, x + 3])
            for row in range(3):
                for column in range(3):
                    total += np.float32(old[y + row, x + 3 * column])
            smoothed = math.floor(total * np.float32(1 / 13) + np.float32(0.5))
            lines[y + 1, x + 3] = _blend(smoothed, old[y + 1, x + 3], factor)


@nb.njit(nogil=True)
def _mean_grey(image: Any) -> Any:
    total = 0
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            total += _grey(image[y, x, 0], image[y, x, 1], image[y, x, 2])
    return nb.int64(total / (image.shape[0] * image.shape[1]) + 0.5)


@nb.njit(nogil=True)
def _count_levels(image: Any, counts: Any) -> None:
    counts[:] = 0
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            for k in range(3):
                counts[k, image[y, x, k]] += 1


@nb.njit(nogil=True)
def _stretch(counts: Any, table: Any, k: Any) -> None:
    """Fill the table that maps channel `k`'s darkest level to 0 and its brightest to 255."""
    low, high = 0, 255
    while counts[k, low] == 0:
        low += 1
    while counts[k, high] == 0:
        high -= 1
    scale = 255.0 / (high - low) if high > low else 1.0
    offset = -low * scale if high > low else 0.0
    for level in range(256):
        table[k, level] = np.uint8(min(max(int(level * scale + offset), 0), 255))


@nb.njit(nogil=True)
def _flatten(counts: Any, table: Any, k: Any) -> None:
    """Fill the table that makes all levels of channel `k` about equally frequent."""
    total, brightest = 0, 0
    for level in range(256):
        total += counts[k, level]
        brightest = counts[k, level] if counts[k, level] else brightest
    step = (total - brightest) // 255
    below = step // 2
    for level in range(256):
        table[k, level] = np.uint8(min(below // step, 255) if step else level)
        below += counts[k, level]


@nb.njit(nogil=True)
def _tabulate(image: Any, counts: Any, table: Any, operation: Any, magnitude: Any, tensor: Any) -> None:
    """Fill `table` `(3, 256)`, which maps each level of each channel to its new level."""
    if operation in (AUTO_CONTRAST, EQUALIZE):
        _count_levels(image, counts)
        for k in range(3):
            if operation == AUTO_CONTRAST:
                _stretch(counts, table, k)
            else:
                _flatten(counts, table, k)
        return
    base = _mean_grey(image) if operation == CONTRAST else 0
    # A threshold slightly above an integer level, as float32's thirds are, counts in torch, but not in Pillow.
    threshold = float(np.float32(255.0 * magnitude)) if tensor else 255.0 * magnitude
    mask = ~((1 << (8 - int(magnitude))) - 1) if operation == POSTERIZE else 0
    for level in range(256):
        if operation == POSTERIZE:
            value = np.uint8(level & mask)
        elif operation == SOLARIZE:
            value = np.uint8(level if level < threshold else 255 - level)
        else:
            value = _blend(base, level, np.float32(1.0 + magnitude))
        for k in range(3):
            table[k, level] = value


@nb.njit(nogil=True)
def _look_up(image: Any, table: Any) -> None:
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            for k in range(3):
                image[y, x, k] = table[k, image[y, x, k]]


@nb.njit(nogil=True)
def _operate(
    image: Any, before: Any, counts: Any, table: Any, operation: Any, magnitude: Any, tensor: Any
) -> None:
    """Apply one operation to `image` `(side, side, 3)`; `before`, `counts` and `table` are its working memory.

    `tensor`: as torchvision does for tensors, else as for Pillow's images.
    """
    if operation == IDENTITY:
        return
    if operation <= ROTATE or operation == SHARPNESS:
        before[:] = image
    if operation <= ROTATE:
        source = _source(operation, magnitude, image.shape[0], image.shape[1])
        if tensor:
            _move_smoothly(image, before, source)
        else:
            _move(image, before, source)
    elif operation == COLOR:
        _saturate(image, np.float32(1.0 + magnitude))
    elif operation == SHARPNESS:
        _sharpen(image, before, np.float32(1.0 + magnitude))
    else:
        _tabulate(image, counts, table, operation, magnitude, tensor)
        _look_up(image, table)


@nb.njit(nogil=True)
def _chain(
    image: Any, before: Any, counts: Any, table: Any, operations: Any, magnitudes: Any, tensor: Any
) -> None:
    for step in range(len(operations)):
        _operate(image, before, counts, table, operations[step], magnitudes[step], tensor)


@nb.njit(nogil=True)
def _add(sums: Any, lines: Any, weight: Any) -> None:
    for y in range(lines.shape[0]):
        for x in range(lines.shape[1]):
            sums[y, x] += weight * np.float32(lines[y, x])


@nb.njit(nogil=True)
def _cut_off(sums: Any, lines: Any) -> None:
    """Write the sums as levels: truncated, not rounded, as in torchvision."""
    for y in range(lines.shape[0]):
        for x in range(lines.shape[1]):
            lines[y, x] = np.uint8(min(sums[y, x], np.float32(255)))


@jit(nb.void(nb.uint8[:, :, :, ::1], nb.int64[:, :, ::1], nb.float64[:, :, ::1], nb.float32[:, ::1]))
def augment(images: Any, operations: Any, magnitudes: Any, weights: Any) -> None:
    """Apply the drawn operations (`policy_draws.Drawn`) to `images` `(n, side, side, 3)`, in place.

    Without weights, the single chain's result replaces the image. With weights, the image and all results are mixed.
    """
    height, width, mixed = images.shape[1], images.shape[2], weights.shape[1] > 0
    before, plain = (
        np.empty((height, width, 3), dtype=np.uint8),
        np.empty((height, width * 3), dtype=np.uint8),
    )
    counts, table = np.empty((3, 256), dtype=np.int64), np.empty((3, 256), dtype=np.uint8)
    sums = np.empty((height if mixed else 0, width * 3), dtype=np.float32)
    for i in range(len(images)):
        if not mixed:
            _chain(images[i], before, counts, table, operations[i, 0], magnitudes[i, 0], False)
            continue
        lines = images[i].reshape(height, width * 3)
        plain[:] = lines
        sums[:] = 0
        _add(sums, plain, weights[i, 0])
        for chain in range(operations.shape[1]):
            lines[:] = plain
            _chain(images[i], before, counts, table, operations[i, chain], magnitudes[i, chain], True)
            _add(sums, lines, weights[i, 1 + chain])
        _cut_off(sums, lines)
