"""The native core, loaded with ctypes: a C library over libjpeg-turbo, without Python's API."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from ...errors import DrivetrainError

_FILE = Path(__file__).with_name("libdrivetrain.dylib" if sys.platform == "darwin" else "libdrivetrain.so")


@cache
def library() -> ctypes.CDLL:
    """Return the library. Its functions run without the GIL.

    Raises:
        DrivetrainError: if it was not built, or libjpeg-turbo is missing.
    """
    try:
        return ctypes.CDLL(str(_FILE))
    except OSError as error:
        raise DrivetrainError(
            f"Drivetrain's native library cannot be loaded ({error}). Install Drivetrain again: pip install . builds it "
            "with a C compiler and libjpeg-turbo's headers (Debian: gcc libjpeg62-turbo-dev)."
        ) from error
