"""Errors when the system refuses memory, threads, processes or file descriptors while data is loaded."""

from __future__ import annotations

import errno

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


def is_exhaustion(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in _ERRNOS
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


LOADER_REMEDY = "Use a smaller batch_size or image_size, batches_ahead=1, or fewer workers."


def exhaustion(error: BaseException, wanted: str, remedy: str = LOADER_REMEDY) -> DataError:
    """Return the error for what the system refused; loading needs `wanted`. For file descriptors, the remedy is about
    their limit."""
    lines = str(error).splitlines()
    message = f"{type(error).__name__}: {lines[0].rstrip('.'):.200}" if lines else type(error).__name__
    if getattr(error, "errno", None) in _NO_FILES or _NO_FILES_WORDS in message:
        reason = "too many open files"
        remedy = "Raise the limit (ulimit -n), use fewer and larger files, or fewer workers."
    else:
        reason = "too little memory, or too few threads or processes,"
    return DataError(f"The system has {reason} to load the data ({message}). Required: {wanted}. {remedy}")
