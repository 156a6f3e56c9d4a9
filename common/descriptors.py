"""The limit of open files, raised while a data set of many files is open."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SPARE = 128
"""Descriptors beside those of the files: for opening (16 threads have a file, its map and its manifest open), and for
what the process opens later: pipes of workers, checkpoints, sockets."""
_lock = threading.Lock()
_wanted: list[int] = []  # descriptors of the data sets for which the limit is raised
_before = 0  # the limit without them


@contextmanager
def more_descriptors(files: int) -> Iterator[Callable[[object], None]]:
    """Inside the block, and as long as the object exists that its function is called with, allow this many more files.

    The soft limit is raised as far as the hard limit allows. It is the process's, so it is put back at the end.
    """
    if _free() >= files + _SPARE:
        yield lambda _: None
        return
    _raise_limit(files)
    kept = False

    def keep(owner: object) -> None:
        nonlocal kept
        kept = True
        weakref.finalize(owner, _restore, files).atexit = False

    try:
        yield keep
    finally:
        if not kept:
            _restore(files)


def _free() -> int:
    try:
        used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  no paths are needed
    except OSError:  # not Linux
        used = 64
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - used


def _raise_limit(files: int) -> None:
    global _before
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        _before = _before if _wanted else soft
        _wanted.append(files)
        missing = files + _SPARE - _free()
        if missing > 0:
            most = soft + missing if hard == resource.RLIM_INFINITY else min(soft + missing, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _restore(files: int) -> None:
    with _lock:
        _wanted.remove(files)
        if not _wanted:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (_before, hard))
