"""The local copy of a remote file: as long as that file, and filled with the blocks that have been asked for."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...signals import interrupts_held
from ...threads import results
from .source import RemoteFile

FACTS = "mirror.json"
"""The address, size and version of the remote file, next to the copy. It is locked while the copy is in use."""
BLOCKS = "blocks"
"""One byte per block, 1 if the block has arrived; shared by all processes that use the copy."""
BLOCK = 1 << 16
"""Bytes. A photograph of 100 KB takes two or three blocks, so little is fetched that is not needed."""
_REQUEST = 128  # blocks in one request: 8 MiB
_GAP = 4  # blocks that are fetched although they were not asked for, where that saves a request
_THREADS = 16  # requests of a process at a time, which hide each other's latency
_shared: weakref.ref[ThreadPoolExecutor] | None = None
_shared_lock = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    """Return the threads that all mirrors of this process share; they end when no mirror uses them any more."""
    global _shared
    with _shared_lock:
        pool = None if _shared is None else _shared()
        if pool is None:
            pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="drivetrain-fetch")
            _shared = weakref.ref(pool)
        return pool


class Mirror:
    """A sparse local copy, which several threads and processes may use and fill at the same time.

    A block is fetched when it is first needed. Two processes that need it at the same time both fetch it and write the
    same bytes. A process that is killed leaves complete blocks only: a block is marked after it is written.

    Args:
        path: the copy, whose folder `cache.local_copy` has made.
    """

    def __init__(self, path: Path) -> None:
        facts = json.loads((path.parent / FACTS).read_text())
        self.address, self.version = str(facts["address"]), str(facts["version"])
        self.size = int(facts["size"])
        # A plain array: every slice of a memmap costs microseconds.
        self._blocks: NDArray[np.uint8] = np.asarray(
            np.memmap(path.parent / BLOCKS, dtype=np.uint8, mode="r+")
        )
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file).atexit = False
        self._lock_file = os.open(path.parent / FACTS, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._lock_file).atexit = False
        fcntl.flock(self._lock_file, fcntl.LOCK_SH)  # `cache` removes only copies that nobody uses
        self._source: RemoteFile | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._pending: dict[int, Future[None]] = {}

    @classmethod
    def at(cls, path: Path) -> Mirror | None:
        """Return the mirror whose copy `path` is; None for any other file."""
        return cls(path) if (path.parent / FACTS).exists() and (path.parent / BLOCKS).exists() else None

    def prefetch(self, starts: NDArray[np.integer], sizes: NDArray[np.integer] | int) -> None:
        """Begin to fetch the ranges, `sizes` bytes from each of `starts` `(n,)`, without waiting for them."""
        self._request(starts, sizes)

    def fetch(self, starts: NDArray[np.integer], sizes: NDArray[np.integer] | int) -> None:
        """Return when the ranges are in the copy.

        Raises:
            DataError: if the source does not deliver them.
        """
        results([*self._request(starts, sizes)])

    def forget(self, start: int, size: int) -> None:
        """Mark a range as not fetched, because its content is not what it should be."""
        with self._lock:
            self._blocks[start // BLOCK : -(-(start + size) // BLOCK)] = 0

    def close(self) -> None:
        """Drop the requests that have not begun, and the threads. The mirror can be used again."""
        with self._lock:
            self._pool = None
            source, self._source = self._source, None
            pending = set(self._pending.values())
            self._pending.clear()
        if source is not None:
            source.close()
        for request in pending:
            request.cancel()

    def _request(self, starts: NDArray[np.integer], sizes: NDArray[np.integer] | int) -> set[Future[None]]:
        """Return the requests, old and new, that the ranges wait for."""
        sizes = np.broadcast_to(np.asarray(sizes, dtype=np.int64), np.shape(starts))
        starts = np.asarray(starts, dtype=np.int64)
        firsts, ends = starts // BLOCK, -(-(starts + sizes) // BLOCK)
        found: set[Future[None]] = set()
        with self._lock:
            missing: set[int] = set()
            for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
                if not self._blocks[first:end].all():
                    missing.update((first + np.flatnonzero(self._blocks[first:end] == 0)).tolist())
            for block in missing & self._pending.keys():
                found.add(self._pending[block])
            for run in _runs(sorted(missing - self._pending.keys())):
                self._pool = self._pool or _threads()
                with interrupts_held():
                    future = self._pool.submit(self._fetch, run)
                self._pending |= dict.fromkeys(run, future)
                found.add(future)
        return found

    def _fetch(self, run: range) -> None:
        """Fetch consecutive blocks."""
        try:
            source = self._source = self._source or RemoteFile(self.address)
            start = run.start * BLOCK
            data = memoryview(source.read(start, min(run.stop * BLOCK, self.size) - start))
            try:
                while data:
                    written = os.pwrite(self._file, data, start)
                    start, data = start + written, data[written:]
            except OSError as error:
                raise DataError(
                    f"The local copy of {self.address} cannot be written: {error.strerror or error}. Free space, or "
                    "set another folder with cache=."
                ) from error
            self._blocks[run.start : run.stop] = 1
        finally:
            with self._lock:
                for block in run:
                    self._pending.pop(block, None)


def _runs(blocks: Iterable[int]) -> Iterator[range]:
    """Yield ranges that cover the ascending block numbers, each at most one request long."""
    first = last = -1
    for block in blocks:
        if first >= 0 and (block - last > _GAP or block - first >= _REQUEST):
            yield range(first, last + 1)
            first = -1
        if first < 0:
            first = block
        last = block
    if first >= 0:
        yield range(first, last + 1)
