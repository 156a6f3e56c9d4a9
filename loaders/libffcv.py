"""FFCV's C library (libjpeg-turbo decoding, OpenCV area resize), imported without its side effects.

Importing `ffcv` sets the global number of torch and numba threads to 1; both are put back here.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import require


@cache
def library() -> ctypes.CDLL:
    """The library, with the argument types of `imdecode` and `resize` declared.

    Raises:
        MissingExtra: if FFCV or numba is not installed.
    """
    numba = require("numba", "ffcv", "load .beton files")
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    try:
        ffcv = require("ffcv.libffcv", "ffcv", "load .beton files")
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)
    loaded: ctypes.CDLL = ffcv.lib
    return loaded


def decodes(jpeg: bytes, width: int, height: int) -> bool:
    """Whether the loader's own decoder reads this JPEG, whole and without a warning.

    Decoded at an eighth of its size: all of the entropy-coded data is read, which is what can fail, while
    the arithmetic on pixels, which cannot, is left out. Three quarters of the time (0.60 ms of 0.78 for a
    photograph of 92 KB).
    """
    source = np.frombuffer(jpeg, dtype=np.uint8)
    target: NDArray[np.uint8] = np.empty(-(-width // 8) * -(-height // 8) * 3, dtype=np.uint8)
    status = library().imdecode(
        source.ctypes.data, len(jpeg), height, width, target.ctypes.data,
        height, width, 0, 0, 1, 8, False, False,
    )  # fmt: skip
    return int(status) == 0
