"""The system's limits while data is loaded: errors when it refuses memory, threads, processes or file descriptors, and
the limit of open files, raised while a data set of many files is open."""

import errno
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import DataError

_NO_FILES = (errno.EMFILE, errno.ENFILE)
_ERRNOS = (errno.ENOMEM, errno.EAGAIN, *_NO_FILES)
_NO_FILES_WORDS = "Too many open files"
_WORDS = (
    "can't start new thread",  # threading
    "DefaultCPUAllocator",  # torch, for CPU memory
    "Cannot allocate memory",
    "exited unexpectedly",  # DataLoader, when the system killed a worker
    "unable to mmap",  # torch, for shared memory
    _NO_FILES_WORDS,  # torch, for shared memory
)
LOADER_REMEDY = "Use a smaller batch_size or image_size, batches_ahead=1, or fewer workers."
_SPARE = 128
"""Descriptors beside those of the files: for opening (16 threads have a file, its map and its manifest open), and for
what the process opens later: pipes of workers, checkpoints, sockets."""
_lock = threading.RLock()  # a garbage collection within a block may call `_restore` in the same thread
_wanted: list[int] = []  # descriptors of the data sets for which the limit is raised
_before = 0  # the limit without them


def is_exhaustion(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in _ERRNOS
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def exhaustion(error: BaseException, wanted: str, remedy: str = LOADER_REMEDY) -> DataError:
    """Return the error for what the system refused; loading needs `wanted`."""
    lines = str(error).splitlines()
    message = f"{type(error).__name__}: {lines[0].rstrip('.'):.200}" if lines else type(error).__name__
    reason = "too little memory, or too few threads or processes,"
    if getattr(error, "errno", None) in _NO_FILES or _NO_FILES_WORDS in message:
        reason = "too many open files"
        remedy = "Raise the limit (ulimit -n), use fewer and larger files, or fewer workers."
    return DataError(f"The system has {reason} to load the data ({message}). Required: {wanted}. {remedy}")


@contextmanager
def more_descriptors(files: int) -> Iterator[Callable[[object], None]]:
    """Allow this many more files inside the block, and as long as the object exists that its function is called with.
    The limit is the process's, so it is put back at the end."""
    global _before
    if not _wanted and _free() >= files + _SPARE:  # else it may be the limit that another data set has raised
        yield lambda _: None
        return
    with _lock:
        _before = _before if _wanted else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        _wanted.append(files)  # from here on, `_restore` leaves the limit
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        missing = files + _SPARE - _free()
        if missing > 0:  # the soft limit, as far as the hard one allows
            most = soft + missing if hard == resource.RLIM_INFINITY else min(soft + missing, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
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


def _restore(files: int) -> None:
    with _lock:
        _wanted.remove(files)
        if not _wanted:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (_before, hard))
