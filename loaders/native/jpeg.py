"""What the loader's decoder thinks of a JPEG, and how it is coded."""

from __future__ import annotations

import ctypes

from .library import OK, library

PLAIN_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
"""Baseline, extended and progressive, with Huffman codes: what every decoder supports."""

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # these three are tables and reserved
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a segment
_MESSAGE = 200  # bytes; libjpeg's JMSG_LENGTH_MAX


def decodes(jpeg: bytes, width: int, height: int) -> bool:
    """Whether the loader's decoder reads this JPEG completely and without a warning.

    Decodes at an eighth of its size: that reads all of the entropy-coded data, which can be damaged, but skips the
    arithmetic on pixels, which cannot fail. Takes three quarters of the time (0.60 ms of 0.78 for a photograph of
    92 KB).
    """
    return _check(jpeg, width, height, 8)[0] == OK


def complaint(jpeg: bytes, width: int, height: int) -> str:
    """Return libjpeg's error or warning when it decodes these bytes; empty if there is none."""
    return _check(jpeg, width, height, 1)[1]


def _check(jpeg: bytes, width: int, height: int, share: int) -> tuple[int, str]:
    message = ctypes.create_string_buffer(_MESSAGE)
    status = library().dt_jpeg_check(jpeg, len(jpeg), height, width, share, message)
    return int(status), message.value.decode(errors="replace")


def frame_type(jpeg: bytes) -> int | None:
    """Return the second byte of the frame marker, 0xC0 to 0xCF, which identifies the coding; None without a frame."""
    at = 2
    while at + 4 <= len(jpeg) and jpeg[at] == 0xFF:
        marker = jpeg[at + 1]
        if marker in _FRAMES:
            return marker
        if marker == 0xFF:  # fill
            at += 1
        elif marker in _ALONE:
            at += 2
        else:
            at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return None
