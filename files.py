"""Writing files so that one that is there is whole: temporary file, fsync, rename."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, cast

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

    Any number of threads and processes may write the same path at a time: the last one to finish wins.

    Raises:
        DrivetrainError: if the folder does not exist or cannot be written, or the disk is full.
    """
    with atomic_files(path) as (file,):
        yield file


@contextmanager
def atomic_files(*paths: Path) -> Iterator[tuple[BinaryIO, ...]]:
    """Binary files that appear under `paths`, in that order, when the block ends, and not at all if it fails.

    All of them are complete and on the disk before the first is renamed. Writers of the same paths take turns
    in renaming, so that the files of two writers are never mixed. Only the death of the process between two
    renames leaves new files beside old ones: files that belong together must prove it to their reader.

    Args:
        paths: of one folder. The last one names the set: in errors, and for the writers that take turns.

    Raises:
        DrivetrainError: if the folder does not exist or cannot be written, or the disk is full.
    """
    with ExitStack() as stack:
        partials = []
        for path in paths:
            with _failure_names(path):
                partials.append(stack.enter_context(_partial_file(path)))
        with _failure_names(paths[-1]):
            yield tuple(file for _, file in partials)
        for path, (_, file) in zip(paths, partials, strict=True):
            with _failure_names(path):
                file.flush()
                os.fsync(file.fileno())
        if len(paths) > 1:
            with _failure_names(paths[-1]):
                stack.enter_context(_turn(paths[-1]))
        for path, (temporary, _) in zip(paths, partials, strict=True):
            with _failure_names(path):
                temporary.replace(path)
        with _failure_names(paths[-1]):
            sync(paths[-1].parent)


@contextmanager
def _failure_names(path: Path) -> Iterator[None]:
    """Raise `OSError` of the block as the typed error about `path`."""
    try:
        yield
    except OSError as error:
        raise DrivetrainError(f"{path} could not be written: {error.strerror or error}.") from error


@contextmanager
def _partial_file(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new temporary file beside `path`, under a name that no other writer has, and removed at the end.

    Its writer holds a lock on it, which the system drops with the process. A temporary file that is not locked
    is therefore the leftover of a writer that was killed, and is removed here.
    """
    _remove_leftovers(path)
    while True:
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        file = cast(BinaryIO, temporary.open("x+b"))
        _lock(file)
        if _is_at(file, temporary):
            break
        file.close()  # another writer found it before it was locked, and removed it
    try:
        yield temporary, file
    finally:
        with suppress(OSError):  # it was renamed
            temporary.unlink()
        with suppress(OSError):  # what is to stay was flushed and synced; the rest may not fit on the disk
            file.close()


def _remove_leftovers(path: Path) -> None:
    """Removes the temporary files of writers of `path` that are dead."""
    name = re.compile(rf"\.{re.escape(path.name)}\.\d+-[0-9a-f]{{8}}\.partial")
    with suppress(OSError), os.scandir(path.parent) as entries:
        leftovers = [Path(entry.path) for entry in entries if name.fullmatch(entry.name) and entry.is_file()]
        for leftover in leftovers:
            with (
                suppress(OSError),
                leftover.open("r+b") as file,
            ):  # it was renamed, or belongs to another user
                if _lock(file, wait=False):
                    leftover.unlink()


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Lets one writer of `path` at a time into the block, by a lock file that exists only meanwhile."""
    place = _lock_file(path)
    while True:
        file = place.open("ab")
        _lock(file)
        if _is_at(file, place):
            break
        file.close()  # the writer before this one has removed it
    try:
        yield
    finally:
        with suppress(OSError):  # where there are no locks, another writer may have removed it
            place.unlink()
        with suppress(OSError):  # said, because a process that was forked meanwhile would keep the lock
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()


def wait_for_renames(path: Path) -> None:
    """Returns when no writer of the set of files that `path` names (`atomic_files`) is between two renames."""
    with suppress(OSError), _lock_file(path).open("rb") as file:  # there is none: nobody is
        _lock(file)


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _lock(file: IO[bytes], wait: bool = True) -> bool:
    """Takes the lock on an open file; False if another has it, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether the open file is the one under that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
