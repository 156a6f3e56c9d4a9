"""How much of this machine belongs to this process."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_GROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Cores this process may run on, divided among the ranks that a launcher started on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // _local_ranks(), 1)


def available_memory() -> int:
    """Bytes this process may still take: of the machine, and of its container, divided among the ranks here."""
    free: int = psutil.virtual_memory().available
    try:  # a container's limit (cgroup 2); the file cache in it gives way
        limit = int((_GROUP / "memory.max").read_text())
        statistics = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        used = int((_GROUP / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
        free = min(free, max(limit - used, 0))
    except (OSError, ValueError):  # no container, or none with a limit
        pass
    return free // _local_ranks()


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
