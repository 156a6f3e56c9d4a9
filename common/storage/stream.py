"""What a process keeps on disk of remote files that are larger: blocks that are wanted soon, instead of whole copies.

The order of an epoch is known in advance, and that of the next one, too. So the block that is dropped is the one whose
next use is the furthest in the future, which is the optimum (Belady 1966, "A study of replacement algorithms for a
virtual-storage computer"), and not the one that was used the longest ago: each sample is used once in an epoch, so the
oldest blocks are those that come back first.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import threading
import weakref
from bisect import insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, count, starmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .addresses import RemoteFile
from .cache import BLOCKS, FACTS, Mirror, runs
from .holes import STREAM_BLOCK, punch

_NEVER = math.inf
_AGAIN = 256.0  # batches after which a part of a table is expected to be read again
_BETWEEN = 32.0  # batches in which a block that came with its neighbours is expected to be read
_AHEAD = 64.0  # batches that may be in preparation
_SPARE = 4  # entries of the heap per block that is kept, after which stale ones are removed
_numbers = count()  # of streams: an entry of one that is gone is of no other
_rooms: dict[Path, Room] = {}
_rooms_lock = threading.Lock()


class Room:
    """The disk space that the streams of a process share. Times are counted in batches, through all epochs."""

    def __init__(self, size: int) -> None:
        self.size, self.blocks = size, 0  # bytes that may be kept, and blocks that are
        self.clock, self._settled = 0.0, 0.0  # the time of the newest batch, and when uses were last settled
        self.lock = threading.RLock()
        self._streams = weakref.WeakValueDictionary[int, Stream]()
        self._heap: list[tuple[float, int, int]] = []  # minus the time of the next use, stream and block

    @classmethod
    def of(cls, folder: Path, size: int) -> Room:
        with _rooms_lock:
            room = _rooms.setdefault(folder, cls(size))
            room.size = size  # as the newest loader wants it
            return room

    def add(self, stream: Stream) -> None:
        with self.lock:
            self._streams[stream.number] = stream

    def push(self, stream: Stream, blocks: Iterable[int]) -> None:
        """Note when those of the blocks that are kept are used next."""
        for block in blocks:
            if stream.is_there(block):
                heapq.heappush(self._heap, (-stream.use_of(block), stream.number, block))

    def trim(self, coming: int = 0) -> None:
        """Drop blocks until the others fit, and those that are coming. Those in use stay, whatever their number."""
        if len(self._heap) > _SPARE * (self.blocks + 1024):
            self._heap = sorted({entry for entry in self._heap if self._stream_of(entry) is not None})
        dropped: dict[Stream, list[int]] = {}
        while (self.blocks + coming) * STREAM_BLOCK > self.size and self._heap:
            entry = heapq.heappop(self._heap)
            if (stream := self._stream_of(entry)) is not None:
                stream.take(entry[2])
                self.blocks -= 1
                dropped.setdefault(stream, []).append(entry[2])
        for stream, blocks in dropped.items():
            stream.drop(sorted(blocks))

    def advance(self, now: float) -> None:
        """Set the clock. Now and then, forget uses that did not happen: of a loop that was left, a table read once."""
        self.clock = now
        if not 0 <= now - self._settled < _AGAIN / 4:
            self._settled = now
            for stream in list(self._streams.values()):
                stream.settle(now - _AHEAD)

    def _stream_of(self, entry: tuple[float, int, int]) -> Stream | None:
        """Return the stream that an entry is of; None if its block is gone, in use, or has another next use."""
        use, number, block = entry
        stream = self._streams.get(number)
        current = stream is not None and stream.is_kept(block) and -use == stream.use_of(block)
        return stream if current else None


class Stream(Mirror):
    """A sparse file that holds some blocks of a remote one; `Room` limits their number. Only this process uses it."""

    block = STREAM_BLOCK

    def __init__(self, path: Path, patience: float | None = None) -> None:
        own = json.loads((path.parent / FACTS).read_text())["stream"]
        if own["process"] != os.getpid():
            raise DataError(
                f"{path} is streamed by another process. Load it with FFCVLoader (loader='ffcv'), whose threads share "
                "it, or leave stream= out."
            )
        super().__init__(path, patience)
        self.number = next(_numbers)
        self.room = Room.of(path.parent.parent, own["bytes"])
        self._lock = self.room.lock
        # Of blocks that are kept or announced: what a rank has in memory does not depend on the length of the file.
        self._uses: dict[int, float] = {}  # when each is wanted next
        self._later: dict[int, float] = {}  # when again, after that
        self._wanted: dict[int, list[float]] = {}  # all announced uses of a block that have not been
        self._pins: dict[int, int] = {}  # how many are reading it
        self.room.add(self)
        with self._lock:
            kept = np.flatnonzero(self._blocks).tolist()
            self.room.blocks += len(kept)
            self.room.push(self, kept)
        weakref.finalize(self, _given_back, self.room, self._blocks).atexit = False

    @cached_property
    def may_change(self) -> bool:
        """Whether a block that is fetched again may be of another version of the file."""
        return not RemoteFile(self.address, self._patience, self.version).is_bound

    def is_there(self, block: int) -> bool:
        return bool(self._blocks[block])

    def is_kept(self, block: int) -> bool:
        return self.is_there(block) and block not in self._pins

    def use_of(self, block: int) -> float:
        return self._uses.get(block, _NEVER)

    def expect(
        self, starts: NDArray[np.integer], sizes: NDArray[np.integer], soon: NDArray[np.float32],
        later: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """Note that ranges are wanted, each at the time `soon` `(n,)`, and again at `later` `(n,)`; fetch them."""
        if not len(soon):
            return
        with self._lock:
            self.room.advance(float(soon.min()))
            times = zip(soon.tolist(), later.tolist(), strict=True)
            for first, end, (use, again) in zip(*_blocks_of(starts, sizes), times, strict=True):
                for block in range(first, end):  # one may have parts of several samples
                    wanted = self._wanted.setdefault(block, [])
                    insort(wanted, use)
                    self._uses[block] = wanted[0]
                    old = self._later.get(block, again)
                    self._later[block] = min(old, again) if old > use else again
                self.room.push(self, range(first, end))
        self.prefetch(starts, sizes)

    @contextmanager
    def pinned(
        self, starts: NDArray[np.integer], sizes: NDArray[np.integer] | int, announced: bool = False
    ) -> Iterator[None]:
        spans = list(zip(*_blocks_of(starts, sizes), strict=True))
        with self._lock:
            for block in chain.from_iterable(starmap(range, spans)):
                self._pins[block] = self._pins.get(block, 0) + 1
        try:
            # What a prefetch of others has brought may have been dropped before it was pinned here.
            while not all(self._blocks[first:end].all() for first, end in spans):
                self.fetch(starts, sizes)
            yield
        finally:
            with self._lock:
                for block in chain.from_iterable(starmap(range, spans)):
                    self._pins[block] -= 1
                    if not self._pins[block]:
                        del self._pins[block]
                    self._uses[block] = self._next_use(block, announced)
                for first, end in spans:
                    self.room.push(self, range(first, end))
                self.room.trim()

    def _next_use(self, block: int, announced: bool) -> float:
        """Return when a block that has just been read, or used as announced, is wanted next."""
        wanted = self._wanted.get(block)
        if wanted and announced:
            del wanted[0]
        if wanted:
            return wanted[0]
        self._wanted.pop(block, None)
        later = self._later.get(block, _NEVER)
        # What nobody has announced is a part of a table, which is read again soon.
        return self.room.clock + _AGAIN if math.isinf(later) else later

    def take(self, block: int) -> None:
        self._blocks[block] = 0
        if block not in self._wanted:
            self._forget(block)

    def _forget(self, block: int) -> None:
        self._uses.pop(block, None)
        self._later.pop(block, None)

    def drop(self, blocks: list[int]) -> None:
        """Give back the disk space of blocks in ascending order, which nobody finds any more."""
        for run in runs(blocks, gap=1):
            self._mark(run, 0)
            punch(self.descriptor, run.start * STREAM_BLOCK, len(run) * STREAM_BLOCK)

    def settle(self, now: float) -> None:
        """Forget uses before the time `now` that have not happened, because a loop was left."""
        with self._lock:
            self._wanted = {block: times for block, times in self._wanted.items() if times[-1] >= now}
            past = np.fromiter(self._uses.values(), np.float64, len(self._uses)) < now
            for block in np.fromiter(self._uses, np.int64, len(self._uses))[past].tolist():
                if self.is_kept(block):
                    self._uses[block] = _NEVER
                    self.room.push(self, [block])
                elif block not in self._pins and block not in self._wanted:
                    self._forget(block)

    def _write(self, run: range, data: memoryview) -> None:
        with self._lock:
            self.room.trim(len(run))
            super()._write(run, data)

    def _mark(self, run: range, arrived: int) -> None:
        with self._lock:
            part = slice(run.start, run.stop)
            before = int(self._blocks[part].sum())
            super()._mark(run, arrived)
            self.room.blocks += arrived * len(run) - before
            if arrived:
                # Between blocks that were asked for: neighbours are often wanted soon.
                for block in run:
                    if math.isinf(self.use_of(block)):
                        self._uses[block] = self.room.clock + _BETWEEN
                self.room.push(self, run)
                self.room.trim()

    @contextmanager
    def _locked(self, run: range, source: RemoteFile) -> Iterator[None]:  # noqa: ARG002
        """Lock nothing: only this process uses it."""
        yield

    def _arrived(self, run: range) -> None:
        """`_mark` has noted it, and some may be gone again."""


def _given_back(room: Room, blocks: NDArray[np.uint8]) -> None:
    with room.lock:
        room.blocks -= int(blocks.sum())


def _blocks_of(starts: NDArray[np.integer], sizes: NDArray[np.integer] | int) -> tuple[list[int], list[int]]:
    """Return the first block of each range, and the one after its last."""
    starts = np.asarray(starts, np.int64)
    ends = starts + np.broadcast_to(np.asarray(sizes, np.int64), starts.shape)
    return (starts // STREAM_BLOCK).tolist(), (-(-ends // STREAM_BLOCK)).tolist()


def mirror_at(path: Path, patience: float | None = None) -> Mirror | None:
    """Return the mirror whose copy `path` is; None for any other file, such as the manifest next to a copy."""
    try:
        if not ((path.parent / FACTS).exists() and (path.parent / BLOCKS).exists()):
            return None
    except OSError:  # a folder that may not be entered: opening the file raises the reason
        return None
    facts = json.loads((path.parent / FACTS).read_text())
    if facts["name"] != path.name:
        return None
    return (Stream if "stream" in facts else Mirror)(path, patience)
