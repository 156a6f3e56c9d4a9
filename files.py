"""Writing files so that one that is there is whole: temporary file, fsync, rename."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .errors import DrivetrainError


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
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise DrivetrainError(f"{path} could not be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # it was renamed, or never made
            temporary.unlink()
