"""What is at an address: requests by fsspec, with time limits and retries; ranges of a file's bytes; and files under an
address, listed, read, written and removed, each complete or absent."""

import hashlib
import json
import os
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ..errors import DataError, DrivetrainError, MissingExtra, require
from ..terminal import Wait
from ..threads import in_order
from .files import atomic_file, write_at

SECONDS = 30.0  # time limit of one request of at most 8 MiB; for longer ones see `SLOWEST`
SLOWEST = 0.3e6  # bytes per second; what is slower counts as a stall
ATTEMPTS = 5  # requests for one range that is answered with an error of the request, or incompletely
PATIENCE = 300.0  # seconds that a server may not answer: as long as deployments and restarts of routers take
_PAUSE, _LONGEST = 0.2, 10.0  # seconds before the second attempt; doubled before each further one
# What the libraries of S3 and of Google's store raise before they ask the server.
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
DENIED, _CHANGED, _BUSY = 403, 412, (408, 425, 429)  # statuses of HTTP
_RANGE = 8 << 20  # bytes of a request
_THREADS = 8  # requests at a time, which hide each other's latency
_ROUND = 0.2  # seconds between two looks for a file
_RENAMING = frozenset({"file", "local", "memory", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs"})
"""Protocols of file systems in which a file is visible while it is written. It is renamed when it is complete; object
stores show only complete files."""
_NOT_REPLACING = frozenset({"smb", "webhdfs"})
"""Of these, protocols whose renaming replaces no file: it fails, or does nothing, without an error."""
_STRONG_TAG = re.compile(r'\bETag=("[^"]*")')  # a weak one, W/"…", matches nothing in a condition

# What file systems call the entity tag, digest or time of change of a file.
_VERSIONS = (
    "ETag", "etag", "Content-MD5", "Digest", "md5Hash", "crc32c", "Last-Modified", "LastModified", "last_modified",
    "updated", "mtime", "created", "blob_id", "modify", "modificationTime",
)  # fmt: skip


def is_address(source: object) -> bool:
    """Return whether a place is an address, such as `s3://bucket/train.beton`, and not a path."""
    return isinstance(source, str) and "://" in source


def local_path(place: str | Path, option: str, error: type[DrivetrainError]) -> Path:
    """Return a path of this machine. Raise `error` for an address, which would become a folder named `s3:`."""
    if not isinstance(place, str | Path):
        raise error(f"{option}={place!r:.80} is not a path.")
    if re.match(r"(\w+::)*\w+:/", str(place)):  # fsspec's "simplecache::s3://…", too
        raise error(f"{option}={str(place)!r} is an address. Pass a path of this machine.")
    return Path(place)


def stamp(name: str | Path, patience: float | None = None) -> list[Any]:
    """Return a file's size and time of change, of an address its size and version, and of a folder a digest of those of
    all files in it; nothing of what cannot be read."""
    with suppress(OSError, DrivetrainError):
        if is_address(name):
            return [*RemoteFile(str(name), patience).facts()]
        path = Path(name)
        if path.is_dir():
            files = sorted(_files_below(path))
            found = json.dumps([[str(one.relative_to(path)), *stamp(one)] for one in files])
            return [hashlib.sha256(found.encode()).hexdigest()[:16]]
        status = path.stat()
        return [status.st_size, status.st_mtime_ns]
    return []


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield all files. Links to folders are followed, as in loaders, but not to one that they are in."""
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not _is_loop(Path(root, name))]  # os.walk descends into these
        yield from (file for name in files if (file := Path(root, name)).is_file())


def _is_loop(folder: Path) -> bool:
    return folder.is_symlink() and any(folder.samefile(above) for above in folder.parents)


def version_of(info: dict[str, Any]) -> str:
    """Return what changes with the content of a file: its entity tag or time of change, from fsspec's facts."""
    return " ".join(f"{name}={info[name]}" for name in _VERSIONS if info.get(name))


class MissingFileError(DataError):
    """The address has no file."""


class Calls:
    """What reads or writes at an address, a URL that fsspec knows: http, https, s3, gs, hf, … `patience` is how many
    seconds the server may not answer; `advice` ends the message; `options` are the file system's."""

    def __init__(
        self,
        address: str,
        patience: float | None = None,
        error: type[DrivetrainError] = DataError,
        advice: str = "Run the same command again when the source answers: what has arrived is kept.",
        **options: Any,
    ) -> None:
        self.address, self._error, self._advice, self._closed = address, error, advice, threading.Event()
        self.patience = PATIENCE if patience is None else patience
        self._server = "/".join(address.split("/")[:3])
        fsspec = require("fsspec", "remote", "read data at an address")
        try:
            self._system, self._path = fsspec.core.url_to_fs(address, **options)
        except ImportError as reason:
            raise MissingExtra(f"{address} cannot be read: {reason}.") from reason
        except ValueError as reason:
            raise error(f"{address} cannot be read: {reason}. Pass an address or a path.") from reason

    def close(self) -> None:
        self._closed.set()

    def closed_within(self, seconds: float) -> bool:
        return self._closed.wait(seconds)

    def _content(self, path: str) -> bytes | None:
        """Return the full content of a small file; None if it does not exist."""
        data: bytes | None = None
        with suppress(MissingFileError):
            data = self._tried(lambda: self._call("cat_file", path))
        return data

    def _call(self, name: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
        """Call a method of the file system, with a time limit for `size` bytes where it works asynchronously."""
        if not self._system.async_impl:
            return getattr(self._system, name)(*arguments, **options)
        from fsspec.asyn import sync

        method, limit = getattr(self._system, f"_{name}"), SECONDS + size / SLOWEST
        return sync(self._system.loop, method, *arguments, timeout=limit, **options)

    def _tried(
        self, request: Callable[[], Any], wrong: Callable[[Any], str] = lambda _: "", *, doing: str = "read"
    ) -> Any:
        """Return the result of a request, repeated with growing pauses: for `patience` seconds while the server does
        not answer, and `ATTEMPTS` times after an error of the request, or if `wrong` has a complaint."""
        wait, attempt = Wait(self.patience), 0
        while True:
            cause, lasting = None, True
            try:
                result = request()
            except Exception as error:  # each file system has its own
                cause, reason, lasting = error, *self._judged(error, doing)
            else:
                if not (reason := wrong(result)):
                    _end_outage(self._server)
                    return result
            attempt += 1
            # Ranges that failed together do not ask again together.
            pause = min(_PAUSE * 2 ** (attempt - 1), _LONGEST) * random.SystemRandom().uniform(0.5, 1.5)
            given_up = attempt >= ATTEMPTS if lasting else wait.left <= 0
            if given_up or self._closed.wait(pause if lasting else min(pause, max(wait.left, 0.01))):
                raise self._error(
                    f"{self.address} cannot be {doing}: {attempt} requests failed in {wait.elapsed:.0f} s, the last "
                    f"one with: {reason}. {self._advice}"
                ) from cause
            if not lasting:
                _report_outage(self._server, self.patience, reason)

    def _judged(self, error: Exception, doing: str) -> tuple[str, bool]:
        """Return the reason why a request failed, and whether waiting will not help; raise what is no use to repeat."""
        if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
            raise self._error(
                f"{self.address} cannot be {doing}: {error}. Check the credentials in the environment."
            ) from error
        if isinstance(error, ImportError):
            raise MissingExtra(f"{self.address} cannot be {doing}: {error}.") from error
        named: BaseException = error
        if isinstance(error, FileNotFoundError):
            if _is_missing(error):
                raise MissingFileError(f"{self.address} does not exist.") from error
            named = error.__cause__ or error
        status = status_of(error)
        if status == _CHANGED:
            raise self._error(
                f"{self.address} was replaced while it was in use: it has another entity tag than when it was opened. "
                "Run the same command again to use the new file; to resume a run, restore the old one."
            ) from error
        unknown = any(isinstance(e, socket.gaierror) and e.errno == socket.EAI_NONAME for e in _chain(error))
        lasting = unknown or (status is not None and 400 <= status < 500 and status not in _BUSY)
        return f"{type(named).__name__}: {named}".rstrip(": "), lasting


class RemoteFile(Calls):
    """A file read in ranges; another `version` (see `facts`) is not read, if the server compares entity tags."""

    def __init__(self, address: str, patience: float | None = None, version: str = "") -> None:
        super().__init__(address, patience)
        tag = _STRONG_TAG.search(version)
        self._is_http = "http" in self._system.protocol
        can = self._is_http or ("s3" in self._system.protocol and hasattr(self._system, "_call_s3"))
        self._tag = tag[1] if tag is not None and can else None

    @property
    def is_bound(self) -> bool:
        """Whether each request is on condition that the file has its entity tag."""
        return self._tag is not None

    def facts(self) -> tuple[int, str]:
        """Return the file's size in bytes, and what changes with its content: its entity tag or time of change."""
        info = self._tried(lambda: self._call("info", self._path))
        size = info.get("size")
        if not isinstance(size, int):
            raise DataError(f"{self.address} has no known size: its source does not tell the length.")
        return size, version_of(info)

    def read(self, start: int, size: int) -> bytes:
        def wrong(data: bytes) -> str:
            if len(data) > size:
                raise DataError(
                    f"{self.address} cannot be read in ranges: its server sent {len(data):,} bytes when asked for "
                    f"{size:,}. Copy the file to this machine, or serve it with range requests."
                )
            return "" if len(data) == size else f"only {len(data):,} of {size:,} bytes arrived"

        data: bytes = self._tried(lambda: self._range(start, start + size), wrong)
        return data

    def _range(self, start: int, end: int) -> Any:
        """Return the bytes from `start` to `end`, on condition that the file has its entity tag, where fsspec can."""
        if self._tag is None:
            return self._call("cat_file", self._path, start=start, end=end)
        if self._is_http:
            headers = self._system.kwargs.get("headers", {}) | {"If-Match": self._tag}  # replaces those configured
            return self._call("cat_file", self._path, start=start, end=end, headers=headers)
        from fsspec.asyn import sync

        return sync(self._system.loop, self._s3_range, start, end, timeout=SECONDS)

    async def _s3_range(self, start: int, end: int) -> Any:
        """As s3fs's `_cat_file`, which has no conditions."""
        bucket, key, _ = self._system.split_path(self._path)
        answer = await self._system._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", IfMatch=self._tag
        )
        async with answer["Body"] as body:
            return await body.read()

    def whole(self) -> bytes | None:
        return self._content(self._path)


_outages: dict[str, Wait] = {}  # of the servers that do not answer now: the threads that wait for one share it
_outages_lock = threading.Lock()


def _report_outage(server: str, patience: float, reason: str) -> None:
    with _outages_lock:
        wait = _outages.setdefault(server, Wait(patience))
        wait.report(lambda: f"{server} does not answer, its requests are repeated: {reason:.200}")


def _end_outage(server: str) -> None:
    if server in _outages:
        with _outages_lock:
            _outages.pop(server, None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def status_of(error: BaseException) -> int | None:
    """Return the status of HTTP in an error of a file system, or in what caused it."""
    return next((status for status in map(_own_status, _chain(error)) if status is not None), None)


def _own_status(error: BaseException | None) -> int | None:
    """Return an error's own status, which each library has in another place: aiohttp, botocore, those with an answer of
    httpx or requests, such as huggingface_hub, and gcsfs."""
    answer = getattr(error, "response", None)
    named = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    for status in (getattr(error, "status", None), named, getattr(answer, "status_code", None)):
        if isinstance(status, int):
            return status
    # Not of aiohttp's parser, whose error for an answer that breaks off has 400; and those of SFTP are other numbers.
    code = None if type(error).__module__.startswith("aiohttp.") else getattr(error, "code", None)
    return code if isinstance(code, int) and 400 <= code < 600 else None


def _is_missing(error: FileNotFoundError) -> bool:
    """Return whether a file does not exist: fsspec's HTTP raises the same error for a server that does not answer."""
    cause = error.__cause__
    status = _own_status(cause)
    return status in (404, 410) if status is not None else not isinstance(cause, OSError | TimeoutError)


class ReplacedError(DataError):
    """The file was replaced while it was copied."""


def download(source: RemoteFile, path: Path, facts: tuple[int, str] | None = None) -> None:
    """Copy a file to `path`, which appears when it is complete; `source.close()` ends it. Raise `ReplacedError` if its
    `facts` are others afterwards, than before by default."""
    facts = facts or source.facts()
    size = facts[0]

    def unchanged() -> None:
        if source.facts() != facts:
            raise ReplacedError(f"{source.address} was replaced while it was copied. Run the same command again.")

    with atomic_file(path) as file:

        def copy(start: int) -> None:
            if source.closed_within(0):
                raise DataError(f"{source.address} was not copied: the work was stopped.")
            write_at(file.fileno(), source.read(start, min(_RANGE, size - start)), start)

        try:
            starts = range(0, size, _RANGE)
            # One range that fails ends the wait of the others.
            with closing(in_order(copy, starts, _THREADS, "drivetrain-download", stop=source.close)) as copied:
                for _ in copied:
                    pass
        except DrivetrainError:  # perhaps of a shorter file; a closed source is asked once, without waiting
            try:
                unchanged()
            except (ReplacedError, MissingFileError):
                raise
            except DrivetrainError:
                pass
            raise
        unchanged()


class RemoteFolder(Calls):
    """The files under the address of a store that can be written (s3, gs, …), by their names relative to it. All
    methods raise errors of the class `error` if it cannot be read or written."""

    def __init__(self, address: str, error: type[DrivetrainError]) -> None:
        protocol = address.partition("://")[0]
        made = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        advice = "Run the same command again when the store answers."
        super().__init__(address.rstrip("/"), error=error, advice=advice, use_listings_cache=False, **made)
        self._renames, self._replaces_not = protocol in _RENAMING, protocol in _NOT_REPLACING

    def versions(self, inside: str = "") -> dict[str, tuple[int, str]]:
        """Return size and version of each file, or of those in the folder `inside`; see `version_of`."""
        place = self._at(inside) if inside else self._path

        def listed() -> Any:
            try:
                return self._call("find", place, detail=True)
            except FileNotFoundError:
                return {}

        start = len(self._path.rstrip("/")) + 1
        return {
            name[start:]: (int(info.get("size") or 0), version_of(info))
            for name, info in self._tried(listed).items()
            if info.get("type") == "file" and len(name) > start
        }

    def read(self, name: str) -> bytes | None:
        return self._content(self._at(name))

    def download(self, name: str, path: Path) -> None:
        """Copy a file to `path`, which appears when it is complete: another one if that replaces it meanwhile."""
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return download(RemoteFile(f"{self.address}/{name}"), path)
                except ReplacedError:
                    if attempt == ATTEMPTS:
                        raise
        except DrivetrainError as error:
            raise self._error(str(error)) from error

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file to `name`, which appears when it is complete, and replaces an older one."""
        size = path.stat().st_size
        self._put(name, lambda target: self._call("put_file", str(path), target, size=size))

    def write(self, name: str, data: bytes) -> None:
        self._put(name, lambda target: self._call("pipe_file", target, data))

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, in this order; those that do not exist are ignored."""
        for name in names:

            def remove(place: str = self._at(name)) -> None:
                with suppress(FileNotFoundError):
                    self._call("rm_file", place)

            self._tried(remove, doing="written")

    def appears(self, name: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (there := self.read(name)) is None and time.monotonic() < deadline:
            time.sleep(_ROUND)
        return there is not None

    def probe(self) -> None:
        name = f".probe-{uuid.uuid4().hex}"
        self.write(name, b"")
        self.remove([name])

    def _put(self, name: str, send: Callable[[str], Any]) -> None:
        place = self._at(name)

        def put() -> None:
            head, _, tail = place.rpartition("/")
            target = f"{head}/.{tail}.partial" if self._renames else place
            send(target)
            if self._renames:
                if self._replaces_not and self._call("exists", place):
                    self._call("rm_file", place)
                self._call("mv", target, place)

        try:
            self._tried(put, doing="written")
        except MissingFileError as error:
            raise self._error(
                f"{self.address} cannot be written: {error.__cause__}. Create the bucket, or pass another address."
            ) from error

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"
