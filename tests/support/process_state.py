"""Whether processes that a test has seen start have ended."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def wait_until_ended(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Waits for at most so long, and gives those that still run.

    A zombie has ended: in a container whose first process reaps no orphans, a grandchild stays one for ever.
    """
    deadline, left = time.monotonic() + seconds, list(processes)
    while (left := [process for process in left if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
