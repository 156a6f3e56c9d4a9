"""FFCV's own Python modules, for its operations and its loader."""

from __future__ import annotations

from types import ModuleType

import torch

from ..errors import require


def ffcv_module(name: str) -> ModuleType:
    """Import a module of FFCV, such as `ffcv.pipeline.state`, without its side effects.

    Importing `ffcv` sets the global number of torch and numba threads to 1.

    Raises:
        MissingExtra: if FFCV or numba is not installed.
    """
    numba = require("numba", "ffcv", "use FFCV's operations")
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    try:
        return require(name, "ffcv", "use FFCV's operations")
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)
