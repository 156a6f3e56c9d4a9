"""Compiles the loader's inner functions with numba, without the GIL, and caches them on disk.

A function compiled here must not call compiled functions of another file: numba's cache only notices changes in the
function's own file. (That is why random numbers, pixels and colours are separate steps.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba as nb
from numba import types

from . import libffcv


def jit(signature: Any) -> Callable[[Any], Any]:
    """Compile without the GIL, storing the result in numba's cache if it is writable.

    No argument may be a writable one-dimensional uint8 array, and none may be created: a stock `ffcv.Loader` in the
    same process declares that very type, which numba shares, as read-only (os_cache.py, `state_type`).
    """

    def decorate(function: Any) -> Any:
        try:
            return nb.njit(signature, cache=True, nogil=True)(function)
        except (RuntimeError, OSError):  # no writable folder, or the disk is full
            return nb.njit(signature, nogil=True)(function)

    return decorate


class CFunction(types.WrapperAddressProtocol):
    """A C function as an argument of compiled code; captured as a constant it would prevent caching."""

    def __init__(self, name: str, signature: Any) -> None:
        function = getattr(libffcv.library(), name)
        self._address = ctypes.cast(function, ctypes.c_void_p).value or 0
        self._signature = signature

    def __wrapper_address__(self) -> int:
        return self._address

    def signature(self) -> Any:
        return self._signature
