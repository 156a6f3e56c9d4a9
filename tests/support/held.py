"""What a process holds: threads and descriptors, and whether something left more of them behind.

A test asks for growth, not for a difference: what an earlier test left in the same process (the connections of a
server, a pool that idles) may end meanwhile.
"""

import gc
import threading
import time

import psutil


def held() -> dict[str, int]:
    gc.collect()
    process, python = psutil.Process(), threading.active_count()
    return {"Python threads": python, "threads": process.num_threads(), "descriptors": process.num_fds()}


def settled() -> dict[str, int]:
    """Return what is held once threads that have ended are gone, some milliseconds later: it stays for 0.2 s."""
    deadline, last, since = time.monotonic() + 10, held(), time.monotonic()
    while time.monotonic() - since < 0.2 and time.monotonic() < deadline:
        time.sleep(0.01)
        if (now := held()) != last:
            last, since = now, time.monotonic()
    return last


def grown(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return, of what is held more than before even 10 s later, both numbers: nothing, if nothing was left behind."""
    deadline, now = time.monotonic() + 10, held()
    while any(now[name] > before[name] for name in now) and time.monotonic() < deadline:
        time.sleep(0.01)
        now = held()
    return {name: (before[name], now[name]) for name in now if now[name] > before[name]}
