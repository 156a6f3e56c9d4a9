"""FFCV's own Python modules, for its operations and its loader."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from ...common.errors import require


@contextmanager
def thread_counts_restored() -> Iterator[None]:
    """Restore the numbers of threads of torch and numba, which FFCV sets on import and when it creates a loader."""
    numba = require("numba", "ffcv", "use FFCV's operations")
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)


def ffcv_module(name: str) -> ModuleType:
    """Import a module of FFCV, such as `ffcv.pipeline.state`, without its side effects."""
    with thread_counts_restored():
        return require(name, "ffcv", "use FFCV's operations")
