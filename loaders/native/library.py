"""The native core, loaded with ctypes: a C library over libjpeg-turbo, without Python's API."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import DrivetrainError

_FILE = Path(__file__).with_name("libdrivetrain.dylib" if sys.platform == "darwin" else "libdrivetrain.so")

OK, UNDECODABLE, WRONG_SIZE, UNREADABLE, NO_MEMORY = range(5)
MESSAGE = 256
"""Bytes of a message."""

_SIDES = [ctypes.c_int64] * 2
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dt_area_bytes": (ctypes.c_size_t, [*_SIDES, *_SIDES]),
    "dt_area": (
        ctypes.c_int,
        [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *_SIDES,
            ctypes.c_void_p,
            *_SIDES,
            ctypes.c_void_p,
            ctypes.c_size_t,
        ],
    ),
    "dt_recode": (
        ctypes.c_int,
        [
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_size_t),
            ctypes.c_char_p,
        ],
    ),
    "dt_free": (None, [ctypes.c_void_p]),
}
"""The result and the arguments of each function; see core.h."""


@cache
def library() -> ctypes.CDLL:
    """Return the library. Its functions run without the GIL.

    Raises:
        DrivetrainError: if it was not built, or libjpeg-turbo is missing.
    """
    try:
        loaded = ctypes.CDLL(str(_FILE))
    except OSError as error:
        raise DrivetrainError(
            f"Drivetrain's native library cannot be loaded ({error}). Install Drivetrain again: pip install . builds it "
            "with a C compiler and libjpeg-turbo's headers (Debian: gcc libjpeg62-turbo-dev)."
        ) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
