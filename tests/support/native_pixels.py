"""The native core's call `dt_load`, on pictures in memory."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from drivetrain.loaders.native import library
from drivetrain.loaders.native.library import address
from numpy.typing import NDArray


def load_pictures(
    pictures: Sequence[NDArray[np.uint8]] | NDArray[np.uint8],
    size: tuple[int, int] | None = None,
    *,
    jpegs: Sequence[bytes] | None = None,
    boxes: Any = None,
    flips: Any = None,
    colors: Any = None,
    corners: Any = None,
    cut: int = 0,
    policy: tuple[Any, Any, Any] | None = None,
    method: int = library.BILINEAR,
) -> NDArray[np.uint8]:
    """Return each picture `(height, width, 3)` loaded, `(n, *size, 3)`; by default whole, in its own size. With
    `jpegs`, the pixels count for their sizes only. `cut` is the side of the black square at `corners`, `policy` the
    operations, magnitudes and weights of `draws.Drawn`."""
    n, (height, width) = len(pictures), size or pictures[0].shape[:2]
    stored = list(jpegs) if jpegs is not None else [picture.tobytes() for picture in pictures]
    sizes = np.array([len(one) for one in stored], np.uint64)
    file = os.memfd_create("pictures")
    try:
        os.write(file, b"".join(stored))
        columns = (
            np.full(n, file, np.int32), np.full(n, jpegs is None, np.int32),
            np.array([picture.shape[1] for picture in pictures], np.uint16),
            np.array([picture.shape[0] for picture in pictures], np.uint16),
            np.cumsum(sizes) - sizes, sizes,
        )  # fmt: skip
        boxes = np.array([[0, 0, *picture.shape[:2]] for picture in pictures] if boxes is None else boxes, np.int64)
        flips = np.zeros(n, np.bool_) if flips is None else np.asarray(flips, np.bool_)
        made = library.Settings(
            height=height, width=width, method=method, dtype=library.UINT8, channels=3, bytes=1, cut=cut
        )
        indices = np.arange(n)
        arrays = [
            None if array is None else np.ascontiguousarray(array, kind)
            for array, kind in zip(
                (colors, corners, *(policy or (None, None, None))),
                (np.float64, np.int64, np.int64, np.float64, np.float32), strict=True,
            )
        ]  # fmt: skip
        choices = library.Choices(
            address(boxes), address(flips), address(arrays[0]), address(arrays[1]),
            *(arrays[2].shape[1:] if arrays[2] is not None else (0, 0)), *map(address, arrays[2:]),
        )  # fmt: skip
        loaded, status = np.empty((n, height, width, 3), np.uint8), np.empty(n, np.int32)
        core = library.library()
        workspace = core.dt_workspace_new()
        views = library.Views(ctypes.pointer(made), ctypes.pointer(choices), 1, address(loaded))
        core.dt_load(
            workspace, library.Samples(*map(address, columns), 3, 1), address(indices), n, views, 1, None, None,
            address(status),
        )  # fmt: skip
        core.dt_workspace_free(workspace)
    finally:
        os.close(file)
    assert not status.any(), status
    return loaded
