"""libjpeg-turbo's decoder, which FFCV's library brings along, with handles that are given back.

FFCV's own `imdecode` makes two handles per thread and frees none, so that each thread that ends leaks them.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from . import libffcv


def open_handle() -> int:
    """A new decoder, for one thread at a time. Give it back with `close_handle`.

    Raises:
        MemoryError: if there is none to be had.
    """
    create = libffcv.library().tjInitDecompress
    create.restype = ctypes.c_void_p
    handle: int | None = create()
    if handle is None:
        raise MemoryError("libjpeg-turbo has no memory for another decoder.")
    return handle


def close_handle(handle: int) -> None:
    """Frees a decoder."""
    libffcv.library().tjDestroy(ctypes.c_void_p(handle))


def complaint(jpeg: bytes, width: int, height: int) -> str:
    """What libjpeg says when it decodes these bytes: an error or a warning; empty if nothing."""
    library, handle = libffcv.library(), open_handle()
    describe = library.tjGetErrorStr2
    describe.restype = ctypes.c_char_p
    source = np.frombuffer(jpeg, dtype=np.uint8)
    target: NDArray[np.uint8] = np.empty(width * height * 3, dtype=np.uint8)
    try:
        code = library.tjDecompress2(
            ctypes.c_void_p(handle), ctypes.c_void_p(source.ctypes.data), ctypes.c_ulong(len(jpeg)),
            ctypes.c_void_p(target.ctypes.data), width, 0, height, 0, 0,
        )  # fmt: skip
        return describe(ctypes.c_void_p(handle)).decode(errors="replace") if code else ""
    finally:
        close_handle(handle)
