"""Files with holes: what a process may keep of a larger file, and how it gives back the rest."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import shutil
import threading
from functools import cache
from pathlib import Path
from typing import Any

from .. import machine
from ..errors import DataError

# Bytes: smaller than a copy's, because what belongs to the samples next to the wanted one would be fetched again.
STREAM_BLOCK = 1 << 14
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


def room_for_streams(folder: Path, limit: float | None) -> int:
    """Return the bytes that this process may keep in the folder: the share of one of this machine's ranks of `limit`
    GB, at most of half of the free disk."""
    return int(min(math.inf if limit is None else limit * 1e9, _half(folder))) // machine.local_ranks()


@cache
def _half(folder: Path) -> float:
    """Return half of the bytes that were free when the process first asked: what it has kept since is of these."""
    return shutil.disk_usage(folder).free / 2


def check_holes(folder: Path) -> None:
    """Raise DataError if files in the folder cannot give back a part of their disk space."""
    probe = folder / f".holes-{os.getpid()}-{threading.get_ident()}"
    try:
        with probe.open("w+b") as file:
            file.truncate(STREAM_BLOCK)
            punch(file.fileno(), 0, STREAM_BLOCK)
    except (OSError, AttributeError) as error:
        raise DataError(
            f"stream=True: the file system of {folder} cannot give back parts of a file ({error}). Pass a folder on "
            "ext4, xfs, btrfs or tmpfs with cache=, or leave stream= out."
        ) from error
    finally:
        probe.unlink(missing_ok=True)


def punch(descriptor: int, start: int, size: int) -> None:
    """Give back the disk space of a range of a file, which then reads as zeros (Linux)."""
    call, mode = _fallocate(), _KEEP_SIZE | _PUNCH_HOLE
    while call(descriptor, mode, ctypes.c_longlong(start), ctypes.c_longlong(size)):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> Any:
    return ctypes.CDLL(None, use_errno=True).fallocate64
