"""The random draws of a sample: pure functions of (seed, epoch, sample index).

Nothing here depends on the thread, the batch or the rank that handles a sample.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from ..native.compiling import jit


@jit(nb.uint64(nb.uint64))
def _mix(x: Any) -> Any:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection that avalanches."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit(nb.uint64(nb.uint64, nb.uint64, nb.uint64))
def sample_key(seed: Any, epoch: Any, index: Any) -> Any:
    """Return the key of all random draws for one sample in one epoch."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = _mix(seed + golden)
    key = _mix(key ^ (epoch + golden))
    return _mix(key ^ (index + golden))


@jit(nb.float64(nb.uint64, nb.int64))
def uniform(key: Any, draw: Any) -> Any:
    """Return a key's `draw`-th uniform number in [0, 1)."""
    bits = _mix(key + np.uint64(draw + 1) * np.uint64(0x9E3779B97F4A7C15))
    return np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@jit(nb.uint64[::1](nb.uint64, nb.uint64, nb.int64[::1]))
def sample_keys(seed: Any, epoch: Any, indices: Any) -> Any:
    """Return the keys of the samples `indices` `(n,)`."""
    keys = np.empty(len(indices), dtype=np.uint64)
    for i in range(len(indices)):
        keys[i] = sample_key(seed, epoch, np.uint64(indices[i]))
    return keys


@jit(nb.float64[:, ::1](nb.uint64[::1], nb.int64, nb.int64))
def uniforms(keys: Any, first: Any, count: Any) -> Any:
    """Return draws `first` to `first + count - 1` of each key, `(n, count)`."""
    values = np.empty((len(keys), count), dtype=np.float64)
    for i in range(len(keys)):
        for k in range(count):
            values[i, k] = uniform(keys[i], first + k)
    return values


@jit("UniTuple(int64, 4)(uint64, int64, int64, float64[::1], float64[::1])")
def random_resized_crop(key: Any, height: Any, width: Any, scale: Any, ratio: Any) -> Any:
    """Return (top, left, height, width) of Inception's crop; after ten tries, the centre.

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


@jit(nb.int64[:, ::1](nb.uint64[::1], nb.int64[::1], nb.int64[::1], nb.float64[::1], nb.float64[::1]))
def random_resized_crops(keys: Any, heights: Any, widths: Any, scale: Any, ratio: Any) -> Any:
    """Return each sample's crop, `(n, 4)`: top, left, height, width in pixels."""
    boxes = np.empty((len(keys), 4), dtype=np.int64)
    for i in range(len(keys)):
        top, left, h, w = random_resized_crop(keys[i], heights[i], widths[i], scale, ratio)
        boxes[i, 0], boxes[i, 1], boxes[i, 2], boxes[i, 3] = top, left, h, w
    return boxes
