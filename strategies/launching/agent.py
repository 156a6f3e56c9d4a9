"""torchrun's agent, which starts this process and must not be outlived by it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h


@contextmanager
def killed_with_agent() -> Iterator[None]:
    """Inside the block, let the system kill this process when torchrun's agent dies.

    An agent that is killed cannot end its workers, which would go on training, and disturb the ranks that replace them.
    Nothing happens without an agent, or on other systems than Linux.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(before))
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_PDEATHSIG, before.value)
