"""How the loader's inner functions are compiled: by numba, without the GIL, and kept on disk.

A function that is compiled here must call no compiled function of another file: numba's cache notices a
change in the function's own file only. (That is why random numbers, pixels and colours are separate steps.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba as nb
from numba import types

from . import libffcv


def jit(signature: Any) -> Callable[[Any], Any]:
    """Compiles without the GIL, keeping the result in numba's cache where that can be written.

    No argument may be a writable one-dimensional uint8 array, and none may be made: a stock `ffcv.Loader`
    in the same process declares that very type, which numba shares, read-only (os_cache.py, `state_type`).
    """

    def decorate(function: Any) -> Any:
        try:
            return nb.njit(signature, cache=True, nogil=True)(function)
        except (RuntimeError, OSError):  # no folder can be written, or the disk is full
            return nb.njit(signature, nogil=True)(function)

    return decorate


class CFunction(types.WrapperAddressProtocol):
    """A C function as an argument of compiled code; captured as a constant it would forbid caching."""

    def __init__(self, name: str, signature: Any) -> None:
        function = getattr(libffcv.library(), name)
        self._address = ctypes.cast(function, ctypes.c_void_p).value or 0
        self._signature = signature

    def __wrapper_address__(self) -> int:
        return self._address

    def signature(self) -> Any:
        return self._signature
