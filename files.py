"""Writing files so that one that is there is whole: temporary file, fsync, rename."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .errors import DrivetrainError


def sync(path: Path) -> None:
    """Returns when the file, or the names in the folder, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears under `path` when the block ends, and not at all if it fails.

    Raises:
        DrivetrainError: if the folder does not exist or cannot be written, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise DrivetrainError(f"{path} could not be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # it was renamed, or never made
            temporary.unlink()
