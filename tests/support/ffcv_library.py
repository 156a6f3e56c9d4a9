"""FFCV's C library (libjpeg-turbo decoding, OpenCV's area resize), the reference of the native core."""

import ctypes
import importlib.util
from functools import cache
from pathlib import Path


@cache
def library() -> ctypes.CDLL:
    """Return the library, with the argument types of `imdecode` declared; FFCV itself is not imported."""
    spec = importlib.util.find_spec("ffcv")
    (folder,) = spec.submodule_search_locations or []
    loaded = ctypes.CDLL(str(next(Path(folder).glob("_libffcv*.so"))))
    sizes, flags = [ctypes.c_uint32] * 2, [ctypes.c_bool] * 2
    loaded.imdecode.argtypes = [
        ctypes.c_void_p, ctypes.c_uint64, *sizes, ctypes.c_void_p, *sizes, *sizes, *sizes, *flags
    ]  # fmt: skip
    return loaded
