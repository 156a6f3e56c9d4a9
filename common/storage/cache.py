"""Local copies of remote files, sparse, filled with the blocks that have been requested. Their folder is made
atomically, found again by the next job, and removed when it grows too large."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..exhaustion import exhaustion, is_exhaustion
from ..signals import interrupts_held
from ..threads import at_exit, results
from .addresses import DENIED, PATIENCE, RemoteFile, status_of
from .files import LockError, acquire, boot_id, cache_folder, locked, write_at, write_file
from .holes import STREAM_BLOCK, check_holes, room_for_streams

_RECENT = 60.0  # seconds after a copy was asked for, in which it is not removed although nobody has opened it
_NEW, _GONE = ".new-", ".gone-"  # begin the names of copies that are being made, and removed
FACTS = "mirror.json"  # the address, size and version of the remote file, next to the copy
BLOCKS = "blocks"  # one byte per block, 1 if the block has arrived; shared by all processes that use the copy
BLOCK = 1 << 16  # bytes: a photograph of 100 KB takes two or three, so little is fetched in vain
_REQUEST = 128  # blocks in one request: 8 MiB
_GAP = 4  # blocks that are fetched although they were not asked for, where that saves a request
_THREADS = 16  # requests of a process at a time, which hide each other's latency
_LOOKS = (0.005, 0.1)  # first and longest seconds between two looks for what another process fetches
_STALLED = 30.0  # seconds after which another process that fetches them is not waited for any more
_shared: weakref.ref[ThreadPoolExecutor] | None = None
_shared_lock = threading.Lock()
_mirrors = weakref.WeakSet["Mirror"]()
_ending = threading.Event()  # the process is: no server is waited for


@dataclass(frozen=True)
class Remote:
    """The options of these names, which `loaders.options.ReadOptions` documents and checks."""

    cache: str | Path | None = None
    cache_limit: float | None = None  # GB
    patience: float = PATIENCE  # seconds
    stream: bool = False


def local_copy(address: str, remote: Remote = Remote()) -> Path:
    """Return the local copy of a remote `.beton` file, still empty if it is new; reading it fetches what is missing.
    The manifest next to it is complete."""
    size, version = RemoteFile(address, remote.patience).facts()
    root = cache_folder() / "remote" if remote.cache is None else Path(remote.cache)
    # Of one version of the file, and of one start of the machine: a crash may lose blocks marked as written.
    facts: dict[str, object] = {"address": address, "size": size, "version": version, "boot": boot_id()}
    name = address.rstrip("/").rpartition("/")[2].partition("?")[0] or "data.beton"
    folder, block = root / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16], BLOCK
    try:
        root.mkdir(parents=True, exist_ok=True)
        if remote.stream:
            check_holes(root)
            block = STREAM_BLOCK
            facts["stream"] = {"process": os.getpid(), "bytes": room_for_streams(root, remote.cache_limit)}
            folder = root / f"{folder.name}-{uuid.uuid4().hex[:16]}"  # of this process alone
        # One without a manifest asks again: it may have been uploaded since.
        if not ((folder / FACTS).exists() and (folder / f"{name}.json").exists()):
            manifest = _manifest(address, remote.patience)
            with locked(root / ".lock"):  # each counts the copies of the others
                for left in (*root.glob(f"{_NEW}*"), *root.glob(f"{_GONE}*")):  # by processes that were killed
                    shutil.rmtree(left, ignore_errors=True)
                if remote.stream:
                    _remove_streams(root)
                elif not (folder / FACTS).exists():  # else it has its room, of which it may have filled all
                    _make_room(root, folder, size, remote.cache_limit)
                _make(folder, name, size, -(-size // block), facts, manifest)
            if manifest is not None and not (folder / f"{name}.json").exists():
                write_file(folder / f"{name}.json", manifest)
        os.utime(folder / FACTS)  # the time of its last use
    except LockError:
        raise
    except OSError as error:
        if is_exhaustion(error):
            raise exhaustion(error, f"file descriptors for the local copy of {address}") from error
        raise DataError(
            f"The local copy of {address} cannot be made in {root}: {error.strerror or error}. Pass cache=FOLDER, a "
            "folder that you can write."
        ) from error
    return folder / name


def _manifest(address: str, patience: float | None) -> bytes | None:
    path, mark, query = address.partition("?")
    try:
        return RemoteFile(f"{path}.json{mark}{query}", patience).whole()
    except DataError as error:
        if status_of(error) != DENIED:  # S3's answer for what is not there, to those who may not list the files
            raise
        return None


def _make(
    folder: Path, name: str, size: int, blocks: int, facts: dict[str, object], manifest: bytes | None
) -> None:  # fmt: skip
    """Create the folder of a copy, if there is none. Several processes may do so: the first one wins."""
    if (folder / FACTS).exists():
        return
    temporary = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder.parent))
    try:
        for file, length in ((name, size), (BLOCKS, max(blocks, 1))):
            with (temporary / file).open("wb") as made:
                made.truncate(length)
        if manifest is not None:
            (temporary / f"{name}.json").write_bytes(manifest)
        (temporary / FACTS).write_text(json.dumps({**facts, "name": name}, indent=1))
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / FACTS).exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_room(root: Path, folder: Path, size: int, limit: float | None) -> None:
    """Remove copies that nobody uses until one of `size` bytes fits. Each other copy counts as what it will be when it
    is full."""
    others: dict[Path, tuple[float, int, int]] = {}
    for path in root.glob("*/" + FACTS):
        with suppress(FileNotFoundError):  # a process that streamed has just removed it
            if path.parent != folder:
                others[path] = path.stat().st_mtime, *_bytes(path.parent)
    allowed = float("inf") if limit is None else limit * 1e9

    def fits() -> bool:
        full, present = (sum(each[n] for each in others.values()) for n in (1, 2))
        return full + size <= allowed and size + full - present <= shutil.disk_usage(root).free

    for path in sorted(others, key=others.__getitem__):  # by the time of its last use
        if fits():
            return
        if _remove_unused(path):
            del others[path]
    if not fits():
        free, used = shutil.disk_usage(root).free / 1e9, sum(full for _, full, _ in others.values()) / 1e9
        raise DataError(
            f"A copy of {size / 1e9:,.2f} GB does not fit into {root}: {free:,.2f} GB of the disk are free, copies in "
            f"use take up to {used:,.2f} GB, and cache_limit is {'not set' if limit is None else f'{limit:g} GB'}. "
            "Pass another cache=FOLDER, or a larger cache_limit=."
        )


@cache
def _remove_streams(root: Path) -> None:
    """Remove what processes that were killed have left of their streams; once, because there may be thousands."""
    for path in root.glob("*-*/" + FACTS):
        _remove_unused(path)


def _bytes(folder: Path) -> tuple[int, int]:
    """Return what a copy's files take on disk when it is full, and now. A stream does not fill."""
    files = [each.stat() for each in folder.iterdir()]
    present = sum(each.st_blocks * 512 for each in files)
    return present if "stream" in _known(folder / FACTS) else sum(each.st_size for each in files), present


def _known(facts: Path) -> dict[str, Any]:
    """Return the facts of a copy. Of one that was made just before the machine crashed, or lost its power, the file may
    be empty: nothing is known of it, and it is removed as others are."""
    try:
        return dict(json.loads(facts.read_text()))
    except ValueError:
        return {}


def _now(root: Path) -> float:
    """Return the time by the clock of the folder's file system, which may be another machine's."""
    with (root / ".lock").open("ab") as file:
        os.utime(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def _remove_unused(facts: Path) -> bool:
    """Remove a copy that nobody uses, or is about to open; return whether it is gone."""
    try:
        if abs(_now(facts.parent.parent) - facts.stat().st_mtime) <= _RECENT:
            return False
        with (facts.parent / _known(facts).get("name", FACTS)).open("r+b") as file:  # NFS locks no other
            if not acquire(file, wait=False):
                return False
            gone = facts.parent.with_name(f"{_GONE}{facts.parent.name}")
            facts.parent.rename(gone)  # first, so that nobody takes the folder for a complete one, or is in its way
            shutil.rmtree(gone, ignore_errors=True)
    except FileNotFoundError:  # a process that streamed has just removed it
        pass
    return True


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
    """A sparse local copy, which several threads and processes may use and fill at the same time. It keeps one
    descriptor: a data set may have thousands of files."""

    block = BLOCK

    def __init__(self, path: Path, patience: float | None = None) -> None:
        facts = json.loads((path.parent / FACTS).read_text())
        self.address, self.version = str(facts["address"]), str(facts["version"])
        self.size = int(facts["size"])
        self._marks, self._patience = path.parent / BLOCKS, patience
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        acquire(self.descriptor, shared=True)  # `cache` removes only copies that nobody uses
        self._blocks = self._marked(range(max(-(-self.size // self.block), 1)))  # known here to have arrived
        self._source: RemoteFile | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock: AbstractContextManager[Any] = threading.Lock()
        self._pending: dict[int, Future[None]] = {}
        _mirrors.add(self)

    def fetch(self, starts: NDArray[np.integer], sizes: NDArray[np.integer] | int) -> None:
        """Return when the ranges are in the copy; raise DataError if the source does not deliver them."""
        results([*self.prefetch(starts, sizes)])

    @contextmanager
    def pinned(
        self, starts: NDArray[np.integer], sizes: NDArray[np.integer] | int,
        announced: bool = False,  # noqa: ARG002  of a stream
    ) -> Iterator[None]:  # fmt: skip
        """Inside the block, the ranges are in the copy; raise DataError if the source does not deliver them.
        `announced`: this is the use that was announced to `Stream.expect`."""
        self.fetch(starts, sizes)
        yield

    def forget(self, start: int, size: int) -> None:
        """Mark a range as not fetched, because its content is not what it should be."""
        with self._lock:
            self._mark(range(start // self.block, -(-(start + size) // self.block)), 0)

    def renew(self, path: Path) -> None:
        """Mark everything in the copy, which is at `path`, as not fetched, and fetch its manifest again."""
        self.renew_manifest(path)
        self.forget(0, self.size)

    def renew_manifest(self, path: Path) -> None:
        """Fetch the manifest again of the copy at `path`."""
        manifest = _manifest(self.address, self._patience)
        if manifest is None:
            path.with_name(f"{path.name}.json").unlink(missing_ok=True)
        else:
            write_file(path.with_name(f"{path.name}.json"), manifest)

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

    def prefetch(self, starts: NDArray[np.integer], sizes: NDArray[np.integer] | int) -> set[Future[None]]:
        """Begin to fetch the ranges, `sizes` bytes from each of `starts` `(n,)`; return the requests, old and new, that
        they wait for."""
        sizes = np.broadcast_to(np.asarray(sizes, dtype=np.int64), np.shape(starts))
        starts = np.asarray(starts, dtype=np.int64)
        firsts, ends = starts // self.block, -(-(starts + sizes) // self.block)
        found: set[Future[None]] = set()
        with self._lock:
            missing: set[int] = set()
            for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
                if not self._blocks[first:end].all():
                    missing.update((first + np.flatnonzero(self._blocks[first:end] == 0)).tolist())
            found.update(self._pending[block] for block in missing & self._pending.keys())
            for run in runs(sorted(missing - self._pending.keys())):
                self._pool = self._pool or _threads()
                with interrupts_held():
                    future = self._pool.submit(self._fetch, run)
                self._pending |= dict.fromkeys(run, future)
                found.add(future)
        return found

    def _fetch(self, run: range) -> None:
        """Fetch consecutive blocks, or wait until another process has."""
        try:
            with self._lock:  # one for all threads, which `close` closes
                source = self._source = self._source or RemoteFile(self.address, self._patience, self.version)
                if _ending.is_set():
                    source.close()
            with self._locked(run, source):
                missing = run.start + np.flatnonzero(self._marked(run) == 0)
                for part in runs(missing.tolist()):
                    self._copy(source, part)
                self._arrived(run)
        finally:
            with self._lock:
                for block in run:
                    self._pending.pop(block, None)

    def _arrived(self, run: range) -> None:
        self._blocks[run.start : run.stop] = 1

    def _copy(self, source: RemoteFile, run: range) -> None:
        start = run.start * self.block
        self._write(run, memoryview(source.read(start, min(run.stop * self.block, self.size) - start)))

    def _write(self, run: range, data: memoryview) -> None:
        try:
            write_at(self.descriptor, data, run.start * self.block)
            self._mark(run, 1)  # after it is written, so that a killed process leaves complete blocks only
        except OSError as error:
            raise DataError(
                f"The local copy of {self.address} cannot be written: {error.strerror or error}. Free space, or "
                "set another folder with cache=."
            ) from error

    def _marked(self, run: range) -> NDArray[np.uint8]:
        """Return which blocks of a run have arrived, as all processes see it."""
        return np.fromfile(self._marks, dtype=np.uint8, count=len(run), offset=run.start)

    def _mark(self, run: range, arrived: int) -> None:
        with self._marks.open("r+b", buffering=0) as file:
            file.seek(run.start)
            file.write(bytes([arrived]) * len(run))
        self._blocks[run.start : run.stop] = arrived

    @contextmanager
    def _locked(self, run: range, source: RemoteFile) -> Iterator[None]:
        """Keep others from fetching these blocks inside the block; wait for those that do, while they do. The locks end
        with the process. They are of the marks: over NFS, one of the copy would wait for all who have that open."""
        if not hasattr(fcntl, "F_OFD_SETLK"):  # not Linux: each process fetches what it needs
            yield
            return
        pause, deadline = _LOOKS[0], time.monotonic() + _STALLED
        with self._marks.open("r+b", buffering=0) as file:
            while not (own := _lock_bytes(file, run, fcntl.F_WRLCK)) and time.monotonic() < deadline:
                if source.closed_within(pause) or self._marked(run).all():
                    break
                pause = min(2 * pause, _LOOKS[1])
            try:
                yield
            finally:
                if own:
                    _lock_bytes(file, run, fcntl.F_UNLCK)


def _lock_bytes(file: IO[bytes], run: range, kind: int) -> bool:
    """Lock bytes of a file, or unlock them; return False if somebody else has locked some of them."""
    lock = struct.pack("hhqqi0q", kind, os.SEEK_SET, run.start, len(run), 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _close_all() -> None:
    _ending.set()
    for mirror in list(_mirrors):
        mirror.close()


at_exit(_close_all)  # otherwise it would wait for servers that do not answer


def runs(blocks: Iterable[int], gap: int = _GAP) -> Iterator[range]:
    """Yield ranges that cover the ascending block numbers, each at most one request long, and blocks between them that
    are less than `gap` apart."""
    first = last = -1
    for block in blocks:
        if first >= 0 and (block - last > gap or block - first >= _REQUEST):
            yield range(first, last + 1)
            first = -1
        if first < 0:
            first = block
        last = block
    if first >= 0:
        yield range(first, last + 1)
