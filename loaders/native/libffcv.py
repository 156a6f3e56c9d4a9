"""FFCV's C library (libjpeg-turbo decoding, OpenCV area resize), loaded without importing FFCV.

Importing `ffcv` takes seconds, and sets the global number of torch and numba threads to 1; loading only the library
takes milliseconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from ...errors import MissingExtra, require


@cache
def library() -> ctypes.CDLL:
    """Return the library, with the argument types of `imdecode` declared.

    Raises:
        MissingExtra: if FFCV is not installed, or the library cannot be loaded.
    """
    spec = importlib.util.find_spec("ffcv")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or []]
    files = [file for folder in folders for file in folder.glob("_libffcv*.so")]
    if not files:
        require("ffcv.libffcv", "ffcv", "load .beton files")
        raise MissingExtra(
            "FFCV is installed without its C library _libffcv. Reinstall it: pip install --force-reinstall ffcv"
        )
    try:
        loaded = ctypes.CDLL(str(files[0]))
    except OSError as error:
        raise MissingExtra(
            f"FFCV's C library cannot be loaded ({error}). Reinstall it: pip install --force-reinstall ffcv"
        ) from error
    sizes, flags = [ctypes.c_uint32] * 2, [ctypes.c_bool] * 2
    loaded.imdecode.argtypes = [
        ctypes.c_void_p, ctypes.c_uint64, *sizes, ctypes.c_void_p, *sizes, *sizes, *sizes, *flags
    ]  # fmt: skip
    return loaded


@contextmanager
def thread_counts_restored() -> Iterator[None]:
    """Restore on exit the numbers of threads of torch and numba, which FFCV sets when it is imported or creates a
    loader."""
    numba = require("numba", "ffcv", "use FFCV's operations")
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)


def ffcv_module(name: str) -> ModuleType:
    """Import a module of FFCV, such as `ffcv.pipeline.state`, without its side effects.

    Raises:
        MissingExtra: if FFCV or numba is not installed.
    """
    with thread_counts_restored():
        return require(name, "ffcv", "use FFCV's operations")
