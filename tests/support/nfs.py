"""Locks of files as they are over NFS."""

import fcntl
import os
import struct
from typing import IO, Any

_KINDS = {fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}


def flock(file: IO[Any] | int, operation: int) -> None:
    """Lock all bytes of a file, as flock(2) does over NFS: such locks and those of some bytes exclude each other, and
    only what is open for writing can be locked exclusively."""
    kind, wait = _KINDS[operation & ~fcntl.LOCK_NB], not operation & fcntl.LOCK_NB
    lock = struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, lock)
