"""What the loader's decoder thinks of a JPEG."""

from __future__ import annotations

import ctypes

from .library import MESSAGE, OK, Limits, library
from .stop import require_running, usual_limits


def decodes(jpeg: bytes, width: int, height: int, limits: Limits | None = None) -> bool:
    """Whether the loader's decoder reads this JPEG completely and without a warning, within limits (default: 2 GiB, and
    those of `stopped_by`, whose end raises `Stopped`). Decodes at an eighth of its size: that reads all of the
    entropy-coded data, which can be damaged, but skips the arithmetic on pixels, which cannot fail. Takes three
    quarters of the time (0.60 ms of 0.78 for a photograph of 92 KB)."""
    status, _ = _check(jpeg, width, height, 8, limits)
    require_running(status)
    return status == OK


def complaint(jpeg: bytes, width: int, height: int, limits: Limits | None = None) -> str:
    """Return libjpeg's error or warning when it decodes these bytes; empty if there is none."""
    return _check(jpeg, width, height, 1, limits)[1]


def _check(jpeg: bytes, width: int, height: int, share: int, limits: Limits | None) -> tuple[int, str]:
    message = ctypes.create_string_buffer(MESSAGE)
    limits = limits or usual_limits()
    status = library().dt_jpeg_check(jpeg, len(jpeg), height, width, share, limits, message)
    return int(status), message.value.decode(errors="replace")
