"""Locks on open files and folders (flock). The system releases them when the process ends."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


def acquire(file: IO[Any] | int, *, wait: bool = True, shared: bool = False) -> bool:
    """Lock an open file or folder; return whether this process holds the lock now. Closing it, or `release`, unlocks
    it. Raise OSError if the file system has no locks."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(file: IO[Any] | int) -> None:
    """Unlock the file. Closing it does not suffice where a process forked in the meantime has it open, too."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process, or thread, at a time into the block; `path` is a lock file, which stays."""
    with path.open("ab") as file:
        acquire(file)
        yield
