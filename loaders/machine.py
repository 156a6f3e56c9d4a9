"""How much of this machine belongs to this process."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores this process may run on, divided among the ranks that a launcher started on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
