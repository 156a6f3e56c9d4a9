"""A file kept open for reading, which other programs may truncate or replace meanwhile: read with `pread`, because
reading a mapped file that has been truncated kills the process (SIGBUS)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...common.errors import BetonError
from ...common.storage.stream import Stream, mirror_at

# A file's device, inode and size in bytes; of a stream, whose copies are many, address, version and size
Identity = tuple[int | str, int | str, int]
_SMALL = 1 << 12  # bytes, such as a row of a table: to copy them costs less than to read into an array


class ChangedError(BetonError):
    """The file has another length than when it was opened: it is damaged as a whole, not one of its samples."""


class ReadError(BetonError):
    """The system could not read the file, now and here: no sample of it is damaged."""


class OpenFile:
    """A file that is open, and readable though it be replaced, as long as this object is referenced. A copy, or an
    object unpickled in another process, reopens it by name; it must still be the same file."""

    def __init__(self, path: Path, patience: float | None = None) -> None:
        self.path, self._patience = path, patience  # seconds; see `Remote`
        self.mirror = mirror_at(path, patience)  # the remote file that this one is a copy of
        if self.mirror is None:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # for `pread`; never seek in it
            weakref.finalize(self, os.close, self.descriptor).atexit = False
        else:
            self.descriptor = self.mirror.descriptor
        status = os.fstat(self.descriptor)
        self.identity: Identity = (status.st_dev, status.st_ino, status.st_size)
        if isinstance(self.mirror, Stream):
            self.identity = (self.mirror.address, self.mirror.version, status.st_size)

    def __reduce__(self) -> tuple[Callable[..., OpenFile], tuple[Path, Identity, float | None]]:
        # A pickled descriptor number would refer to whatever file is opened after this one is closed.
        return _opened_again, (self.path, self.identity, self._patience)

    def __len__(self) -> int:
        return self.identity[2]

    def __getitem__(self, part: slice) -> NDArray[np.uint8]:
        start, stop, _ = part.indices(len(self))
        return self.read_many(np.array([start]), max(stop - start, 0)).reshape(-1)

    def mapped(self) -> NDArray[np.uint8]:
        """Return the full file, memory-mapped, `(bytes,)` uint8, read-only, as long as the array is referenced."""
        # By its descriptor: the same file, even if it is replaced now.
        with open(self.descriptor, "rb", closefd=False) as opened:
            try:
                return np.asarray(np.memmap(opened, dtype=np.uint8, mode="r"))
            except ValueError:  # an empty file cannot be mapped
                raise BetonError(
                    f"{self.path} was emptied by another program while it was being opened. Convert the data again."
                ) from None

    def require_size(self) -> None:
        now = os.fstat(self.descriptor).st_size
        if now != len(self):
            raise ChangedError(
                f"{self.path} had {len(self)} bytes when it was opened and now has {now}: another program changed it "
                "while it was in use. Convert the data again, under another name, and create a new loader."
            )

    def require_identity(self, identity: Identity) -> None:
        if self.identity != identity:
            raise BetonError(
                f"{self.path} is no longer the file that the loader opened: it was replaced or changed while in use. "
                "Create a new loader."
            )

    def pinned(self, starts: NDArray[np.integer], sizes: NDArray[np.integer] | int) -> AbstractContextManager[None]:
        """Inside the block, the `sizes` bytes from each of `starts` `(n,)` are on this machine; see `Mirror.pinned`."""
        return nullcontext() if self.mirror is None else self.mirror.pinned(starts, sizes)

    def announce(self, starts: NDArray[np.integer], sizes: NDArray[np.integer]) -> None:
        """Ask the system to read the `sizes` bytes from each of `starts` `(n,)` into memory, without waiting."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            os.posix_fadvise(self.descriptor, start, size, os.POSIX_FADV_WILLNEED)

    def read(self, start: int, size: int) -> bytes:
        return self.read_many(np.array([start]), size).tobytes()

    def read_many(self, starts: NDArray[np.integer], size: int) -> NDArray[np.uint8]:
        """Return the `size` bytes that begin at each of `starts` `(n,)`, as `(n, size)`."""
        with self.pinned(starts, size):
            return self._read_many(starts, size)

    def _read_many(self, starts: NDArray[np.integer], size: int) -> NDArray[np.uint8]:
        if len(starts) > 1 and size <= _SMALL:
            joined = self._small(starts.tolist(), size)
            if len(joined) == len(starts) * size:
                return np.frombuffer(joined, dtype=np.uint8).reshape(-1, size)
        found: NDArray[np.uint8] = np.empty((len(starts), size), dtype=np.uint8)
        try:
            for row, start in zip(found, starts.tolist(), strict=True):
                done = 0
                while done < size:
                    got = os.preadv(self.descriptor, [row[done:].data], start + done)
                    if got == 0:
                        self.require_size()
                        raise BetonError(f"{self.path} ended at byte {start + done} during a read.")
                    done += got
        except OSError as error:
            raise ReadError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        return found

    def _small(self, starts: list[int], size: int) -> bytearray:
        """Return what is read at once of each: fewer bytes at the file's end, and of a file that cannot be read."""
        try:
            return bytearray().join([os.pread(self.descriptor, size, start) for start in starts])
        except OSError:
            return bytearray()


def _opened_again(path: Path, identity: Identity, patience: float | None) -> OpenFile:
    file = OpenFile(path, patience)
    file.require_identity(identity)
    return file
