"""libjpeg-turbo's decoder, from FFCV's library, with handles that are freed.

FFCV's own `imdecode` creates two handles per thread and frees none, so each thread that ends leaks them.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from . import libffcv


class Handle:
    """A handle of a decoder, for one thread at a time.

    It is freed by `close`, or when it is no longer referenced. Not at interpreter exit: the system reclaims everything
    then, and a thread may still use it.

    Attributes:
        address: the handle, as passed to the C functions.

    Raises:
        MemoryError: if there is no memory for it.
    """

    def __init__(self) -> None:
        library = libffcv.library()
        function = library.tjInitDecompress
        function.restype = ctypes.c_void_p
        address: int | None = function()
        if address is None:
            raise MemoryError("libjpeg-turbo has no memory for another decoder.")
        self.address = address
        self._free = weakref.finalize(self, library.tjDestroy, ctypes.c_void_p(address))
        self._free.atexit = False

    def close(self) -> None:
        """Free the handle; a second call does nothing."""
        self._free()


def decodes(jpeg: bytes, width: int, height: int) -> bool:
    """Whether the loader's decoder reads this JPEG completely and without a warning.

    Decodes at an eighth of its size: that reads all of the entropy-coded data, which can be damaged, but skips the
    arithmetic on pixels, which cannot fail. Takes three quarters of the time (0.60 ms of 0.78 for a photograph of
    92 KB).
    """
    with closing(Handle()) as handle:
        return _decompress(handle, jpeg, -(-width // 8), -(-height // 8)) == 0


def complaint(jpeg: bytes, width: int, height: int) -> str:
    """Return libjpeg's error or warning when it decodes these bytes; empty if there is none."""
    with closing(Handle()) as handle:
        return "" if _decompress(handle, jpeg, width, height) == 0 else _error(handle)


def _error(handle: Handle) -> str:
    """Return this handle's last libjpeg message."""
    describe = libffcv.library().tjGetErrorStr2
    describe.restype = ctypes.c_char_p
    return str(describe(ctypes.c_void_p(handle.address)).decode(errors="replace"))


def _decompress(handle: Handle, jpeg: bytes, width: int, height: int) -> int:
    """Decode to this many pixels; return libjpeg-turbo's status, 0 for success."""
    source = np.frombuffer(jpeg, dtype=np.uint8)
    target: NDArray[np.uint8] = np.empty(width * height * 3, dtype=np.uint8)
    return int(
        libffcv.library().tjDecompress2(
            ctypes.c_void_p(handle.address), ctypes.c_void_p(source.ctypes.data), ctypes.c_ulong(len(jpeg)),
            ctypes.c_void_p(target.ctypes.data), width, 0, height, 0, 0,
        )
    )  # fmt: skip
