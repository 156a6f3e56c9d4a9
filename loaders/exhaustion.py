"""Memory, threads, processes and descriptors that the system refuses while data is loaded."""

from __future__ import annotations

import errno

from ..errors import DataError

_ERRNOS = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
_WORDS = (
    "can't start new thread",  # threading
    "DefaultCPUAllocator",  # torch, for memory of the CPU
    "Cannot allocate memory",
    "exited unexpectedly",  # DataLoader, whose worker the system has ended
    "unable to mmap",  # torch, for memory that processes share
)


def is_exhaustion(error: BaseException) -> bool:
    """Return whether the system refused memory, a thread, a process or a descriptor."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno in _ERRNOS
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


LOADER_REMEDY = "Use a smaller batch_size or image_size, batches_ahead=1, or fewer workers."


def exhaustion(error: BaseException, wanted: str, remedy: str = LOADER_REMEDY) -> DataError:
    """Return the error for what the system refused.

    Args:
        error: the system's.
        wanted: what was to be had, in words.
        remedy: a sentence.
    """
    lines = str(error).splitlines()
    said = f"{type(error).__name__}: {lines[0].rstrip('.'):.200}" if lines else type(error).__name__
    return DataError(
        f"The system has too little memory, or too few threads or processes, to load the data ({said}). Needed are "
        f"{wanted}. {remedy}"
    )
