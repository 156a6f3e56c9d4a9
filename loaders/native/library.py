"""The native core, loaded with ctypes: a C library over libjpeg-turbo, without Python's API."""

import ctypes
import sys
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...common.errors import DrivetrainError

# A sample's status; as in core.h.
OK, UNDECODABLE, WRONG_SIZE, UNREADABLE, NO_MEMORY, STOPPED, TOO_LARGE = range(7)
MESSAGE = 256  # bytes
# Bytes for a JPEG's coefficients where nothing else is known: above those of the most pixels that Pillow opens, in
# three components, 1.1 GB.
MOST_MEMORY = 1 << 31
BILINEAR, AREA, SHIFT, BICUBIC, NEAREST, PILLOW = range(6)
UINT8, FLOAT32, BFLOAT16 = range(3)

_FILE = Path(__file__).with_name("libdrivetrain.dylib" if sys.platform == "darwin" else "libdrivetrain.so")


class Samples(Structure):
    """`dt_samples`: addresses of the columns of a data set, each `(N,)`, and what its pixels are."""

    _fields_ = [
        *((name, c_void_p) for name in ("descriptors", "modes", "widths", "heights", "pointers", "sizes")),
        ("channels", c_int64), ("bytes", c_int64),
    ]  # fmt: skip


class Settings(Structure):
    """`dt_settings`: what becomes of every sample of a loader."""

    _fields_ = (
        ("height", c_int64), ("width", c_int64), ("method", c_int32), ("dtype", c_int32),
        ("channels", c_int64), ("bytes", c_int64), ("factors", c_void_p), ("summands", c_void_p),
        ("table", c_void_p), ("cut", c_int64), ("fill", ctypes.c_uint8 * 8),
    )  # fmt: skip


class Choices(Structure):
    """`dt_choices`: what was drawn for each of m images; None where nothing is."""

    _fields_ = (
        ("boxes", c_void_p), ("flips", c_void_p), ("colors", c_void_p), ("corners", c_void_p),
        ("chains", c_int64), ("steps", c_int64), ("operations", c_void_p), ("magnitudes", c_void_p),
        ("weights", c_void_p), ("places", c_void_p),
    )  # fmt: skip


class Views(Structure):
    """`dt_views`: the images of one size that are made of each sample, `views` of them."""

    _fields_ = (
        ("settings", POINTER(Settings)), ("choices", POINTER(Choices)), ("views", c_int64), ("images", c_void_p),
    )  # fmt: skip


class Limits(Structure):
    """`dt_limits`: the address of a flag that ends the call when it is set, and bytes for a JPEG's coefficients."""

    _fields_ = (("stop", c_void_p), ("memory", c_uint64))


_INTERFACE = 2  # as `DT_INTERFACE` in core.h

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # name: result, arguments
    "dt_workspace_new": (c_void_p,),
    "dt_workspace_free": (None, c_void_p),
    "dt_load": (
        None, c_void_p, POINTER(Samples), c_void_p, c_int64, POINTER(Views), c_int64, POINTER(Limits), c_void_p,
        c_void_p,
    ),
    "dt_workspace_bytes": (c_uint64, POINTER(Samples), c_int64, POINTER(Views), c_int64),
    "dt_load_picture": (c_int32, c_void_p, POINTER(Samples), c_void_p, POINTER(Views), POINTER(Limits)),
    "dt_finish": (None, POINTER(Settings), POINTER(Choices), c_int64, c_void_p, c_void_p),
    "dt_area_bytes": (c_size_t, *[c_int64] * 4),
    "dt_area": (
        c_int32, c_void_p, c_size_t, c_int64, c_int64, POINTER(Limits), c_void_p, c_int64, c_int64, c_void_p,
        c_size_t,
    ),
    "dt_crc32": (c_uint32, c_uint32, c_char_p, c_size_t),
    "dt_recode": (
        c_int32, c_char_p, c_size_t, c_size_t, POINTER(Limits), POINTER(c_void_p), POINTER(c_size_t), c_char_p,
    ),
    "dt_free": (None, c_void_p),
    "dt_interface": (None, c_void_p),
    "dt_jpeg_version": (c_int32, c_char_p),
    "dt_jpeg_check": (c_int32, c_char_p, c_size_t, c_int64, c_int64, c_int32, POINTER(Limits), c_char_p),
    "dt_sample_keys": (None, c_uint64, c_uint64, c_void_p, c_int64, c_void_p),
    "dt_view_keys": (None, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "dt_uniforms": (None, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "dt_random_resized_crops": (None, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
}  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """Return the library, with its functions' types declared. They run without the GIL."""
    try:
        loaded = ctypes.CDLL(str(_FILE))
    except OSError as error:
        raise DrivetrainError(
            f"Drivetrain's native library cannot be loaded ({error}). Install Drivetrain again: pip install . "
            "builds it with a C compiler and libjpeg-turbo's headers (Debian: gcc libjpeg62-turbo-dev)."
        ) from error
    structures = [ctypes.sizeof(one) for one in (Samples, Settings, Choices, Views, Limits)]
    values = (c_int64 * (1 + len(structures)))()
    if hasattr(loaded, "dt_interface"):
        loaded.dt_interface(values)
    if list(values) != [_INTERFACE, *structures]:
        raise DrivetrainError(
            f"{_FILE} was built from other sources than this version of Drivetrain. Build it again: make, or pip "
            "install . in its folder."
        )
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def jpeg_version() -> str:
    """Return which libjpeg-turbo is in use: its interface and version, and the file that was loaded."""
    message = ctypes.create_string_buffer(MESSAGE)
    status = library().dt_jpeg_version(message)
    text = message.value.decode(errors="replace")
    if status != OK:
        raise DrivetrainError(
            f"The libjpeg-turbo that is loaded is not the one that Drivetrain was built with ({text}). Build it again: "
            "make, or pip install . in its folder."
        )
    return text


def address(array: NDArray[Any] | None) -> int | None:
    """Return where a contiguous array's memory begins; None for no array, or an empty one."""
    if array is None or array.size == 0:
        return None
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
