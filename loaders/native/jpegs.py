"""What the loader's decoder thinks of a JPEG, and lossless recoding: the same coefficients, so the same pixels, with
other codes."""

import ctypes
import io
from collections.abc import Iterator

from PIL import Image

from .library import MESSAGE, MOST_MEMORY, NO_MEMORY, OK, Limits, library
from .stop import require_running, usual_limits

SEQUENTIAL_FRAMES = frozenset((0xC0, 0xC1))  # baseline and extended, with Huffman codes
ARITHMETIC_FRAMES = frozenset((0xC9, 0xCA))
# What the loader's decoder reads. 0xC2 is progressive, with Huffman codes.
DECODED_FRAMES = SEQUENTIAL_FRAMES | {0xC2} | ARITHMETIC_FRAMES

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # these three are tables and reserved
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a segment
_ANY_SIZE = (1 << 8 * ctypes.sizeof(ctypes.c_size_t)) - 1
# As in libjpeg.c: scans, and pixels times scans; and as many as the most pixels that Pillow opens may have.
_MOST_SCANS, _MOST_WORK, _FEW_SCANS = 500, 1 << 32, 24


def _markers(jpeg: bytes) -> Iterator[int]:
    """Yield the second byte of each marker, and 0 for entropy-coded data between them."""
    at = 2
    while 0 <= at < len(jpeg) - 3:
        marker = jpeg[at + 1]
        if jpeg[at] != 0xFF or marker == 0:
            yield 0
            at = jpeg.find(b"\xff", at + 1)
        elif marker == 0xFF:  # fill
            at += 1
        else:
            yield marker
            at += 2 if marker in _ALONE else 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")


def frame_type(jpeg: bytes) -> int | None:
    """Return the second byte of the frame marker, 0xC0 to 0xCF, which identifies the coding; None without a frame."""
    return next((marker for marker in _markers(jpeg) if marker in _FRAMES or marker == 0), None) or None


def decodes(jpeg: bytes, width: int, height: int) -> bool:
    """Whether the loader's decoder reads this JPEG completely and without a warning, within limits: 2 GiB, and
    those of `stopped_by`, whose end raises `Stopped`. MemoryError if the system refuses the memory for it."""
    # At an eighth of its size: that reads all of the entropy-coded data, which can be damaged, but skips the arithmetic
    # on pixels, which cannot fail, and a quarter of the time (0.60 ms of 0.78 for a photograph of 92 KB).
    status, _ = _check(jpeg, width, height, 8, usual_limits())
    if status == NO_MEMORY:  # no fault of the file
        raise MemoryError("The system has no memory to decode a JPEG.")
    require_running(status)
    return status == OK


def complaint(jpeg: bytes, width: int, height: int, limits: Limits | None = None) -> str:
    """Return libjpeg's error or warning when it decodes these bytes; empty if there is none."""
    return _check(jpeg, width, height, 1, limits or usual_limits())[1]


def _check(jpeg: bytes, width: int, height: int, share: int, limits: Limits) -> tuple[int, str]:
    message = ctypes.create_string_buffer(MESSAGE)
    status = library().dt_jpeg_check(jpeg, len(jpeg), height, width, share, limits, message)
    return int(status), message.value.decode(errors="replace")


def recoded(jpeg: bytes, most: int = _ANY_SIZE, memory: int = MOST_MEMORY) -> bytes | None:
    """Return any JPEG as a baseline one with optimized Huffman tables and identical pixels, without metadata; None
    above `most` bytes; ValueError if it has a warning, or its coefficients take more than `memory` bytes."""
    native = library()
    result, size = ctypes.c_void_p(), ctypes.c_size_t()
    message = ctypes.create_string_buffer(MESSAGE)
    status = native.dt_recode(
        jpeg, len(jpeg), most, usual_limits(memory), ctypes.byref(result), ctypes.byref(size), message
    )
    if status == NO_MEMORY:
        raise MemoryError("The system has no memory for a JPEG's coefficients.")
    require_running(status)
    if status != OK:
        raise ValueError(message.value.decode(errors="replace"))
    if result.value is None:
        return None
    try:
        return ctypes.string_at(result, size.value)
    finally:
        native.dt_free(result)


def check_scans(jpeg: bytes) -> None:
    """Raise ValueError for more scans than the loader's decoder takes: Pillow has no limit. A progressive file of some
    kilobytes may have any number of them, and each takes a pass over all pixels."""
    if jpeg.count(b"\xff\xda") <= _FEW_SCANS:  # also those in other segments, but that is quick
        return
    with Image.open(io.BytesIO(jpeg)) as image:
        pixels = image.width * image.height
    most = min(_MOST_SCANS, _MOST_WORK // max(pixels, 1))
    if sum(marker == 0xDA for marker in _markers(jpeg)) > most:
        raise ValueError(f"it has more than {most} scans, the most for its size")


def huffman_coded(jpeg: bytes) -> bytes:
    """Return a JPEG as Pillow may read it: one with arithmetic codes as a baseline JPEG with identical pixels, any
    other file unchanged. ValueError for one with a warning or too many scans; and Pillow's for too many pixels."""
    if not jpeg.startswith(b"\xff\xd8"):
        return jpeg
    check_scans(jpeg)
    if frame_type(jpeg) not in ARITHMETIC_FRAMES:  # of which Pillow's chunked reader decodes up to 64 KiB
        return jpeg
    with Image.open(io.BytesIO(jpeg)):  # rejects what would take gigabytes
        pass
    plain = recoded(jpeg)
    assert plain is not None  # no limit of its size
    return plain
