"""The random draws of a sample: pure functions of (seed, epoch, sample index), in the native core.

Nothing here depends on the thread, the batch or the rank that handles a sample.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..native.library import address, library


def sample_keys(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the keys `(n,)` of all random draws for the samples `indices` `(n,)` in one epoch."""
    indices = np.ascontiguousarray(indices, dtype=np.int64)
    keys = np.empty(len(indices), dtype=np.uint64)
    library().dt_sample_keys(seed, epoch, address(indices), len(indices), address(keys))
    return keys


def view_keys(keys: NDArray[np.uint64], first: int, count: int) -> NDArray[np.uint64]:
    """Return the keys `(n · count,)` of views `first` to `first + count - 1` of each sample, sample by sample. View 0
    has the sample's own key."""
    keys = np.ascontiguousarray(keys)
    views = np.empty(len(keys) * count, dtype=np.uint64)
    library().dt_view_keys(address(keys), len(keys), first, count, address(views))
    return views


def uniforms(keys: NDArray[np.uint64], first: int, count: int) -> NDArray[np.float64]:
    """Return draws `first` to `first + count - 1` of each key, uniform in [0, 1), `(n, count)`."""
    keys = np.ascontiguousarray(keys)
    values = np.empty((len(keys), count), dtype=np.float64)
    library().dt_uniforms(address(keys), len(keys), first, count, address(values))
    return values


def random_resized_crops(
    keys: NDArray[np.uint64],
    heights: NDArray[np.int64],
    widths: NDArray[np.int64],
    scale: NDArray[np.float64],
    ratio: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Return each sample's crop, `(n, 4)`: top, left, height, width in pixels, by draws 0 to 39 of its key.
    Inception's; after ten tries, the center. The same distribution as torchvision's `RandomResizedCrop.get_params`."""
    keys = np.ascontiguousarray(keys)
    heights, widths = np.ascontiguousarray(heights), np.ascontiguousarray(widths)
    boxes = np.empty((len(keys), 4), dtype=np.int64)
    library().dt_random_resized_crops(
        address(keys),
        address(heights),
        address(widths),
        len(keys),
        address(scale),
        address(ratio),
        address(boxes),
    )
    return boxes
