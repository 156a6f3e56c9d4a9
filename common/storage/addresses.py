"""What is at an address: requests by fsspec, with time limits and retries, and ranges of a file's bytes."""

from __future__ import annotations

import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import DataError, DrivetrainError, MissingExtra, require
from ..waiting import Wait

SECONDS = 30.0
"""Time limit of one request of at most 8 MiB; for longer ones see `SLOWEST`."""
SLOWEST = 0.3e6
"""Bytes per second. What is slower counts as a stall."""
ATTEMPTS = 5
"""Requests for one range that is answered with an error of the request, or incompletely."""
PATIENCE = 300.0
"""Seconds that a server may not answer, by default: as long as a deployment or the restart of a router takes."""
_PAUSE, _LONGEST = 0.2, 10.0  # seconds before the second attempt; doubled before each further one
_CHANGED, _BUSY = 412, (408, 425, 429)  # statuses of HTTP
_STRONG_TAG = re.compile(r'\bETag=("[^"]*")')  # a weak one, W/"…", matches nothing in a condition

# What file systems call the entity tag, digest or time of change of a file.
_VERSIONS = (
    "ETag", "etag", "Content-MD5", "Digest", "md5Hash", "crc32c", "Last-Modified", "LastModified", "last_modified",
    "updated", "mtime", "created",
)  # fmt: skip


def is_address(source: object) -> bool:
    """Return whether a place is an address, such as `s3://bucket/train.beton`, and not a path."""
    return isinstance(source, str) and "://" in source


def version_of(info: dict[str, Any]) -> str:
    """Return what changes with the content of a file: its entity tag or time of change, from fsspec's facts."""
    return " ".join(f"{name}={info[name]}" for name in _VERSIONS if info.get(name))


class MissingFileError(DataError):
    pass


class Calls:
    """What reads or writes at an address, a URL that fsspec knows: http, https, s3, gs, hf, …

    `patience` is how many seconds the server may not answer; `advice` is the end of the message when requests have
    failed; `options` are the file system's.
    """

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
        """Do not repeat requests that fail from now on."""
        self._closed.set()

    def closed_within(self, seconds: float) -> bool:
        return self._closed.wait(seconds)

    def _content(self, path: str) -> bytes | None:
        """Return the full content of a small file; None if it does not exist."""
        try:
            data: bytes = self._tried(lambda: self._call("cat_file", path))
        except MissingFileError:
            return None
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
        """Return the result of a request.

        It is repeated with growing pauses: for `patience` seconds while the server does not answer, and `ATTEMPTS`
        times if it answers with an error of the request, or `wrong` has a complaint.
        """
        wait, attempt = Wait(self.patience), 0
        while True:
            cause, lasting = None, True
            try:
                result = request()
            except Exception as error:  # each file system has its own
                cause, reason, lasting = error, *self._judged(error, doing)
            else:
                if not (reason := wrong(result)):
                    outages.over(self._server)
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
                outages.report(self._server, self.patience, reason)

    def _judged(self, error: Exception, doing: str) -> tuple[str, bool]:
        """Return the reason why a request failed, and whether waiting will not help; raise what is no use to repeat."""
        if isinstance(error, PermissionError):
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
        status = _status(error)
        if status == _CHANGED:
            raise self._error(
                f"{self.address} was replaced while it was in use: it has another entity tag than when it was opened. "
                "Run the same command again to use the new file; to resume a run, restore the old one."
            ) from error
        lasting = (status is not None and 400 <= status < 500 and status not in _BUSY) or _is_unknown_host(
            error
        )
        return f"{type(named).__name__}: {named}".rstrip(": "), lasting


class RemoteFile(Calls):
    """A file that is read in ranges; another `version` (from `facts`) is not read, if the server compares entity tags."""

    def __init__(self, address: str, patience: float | None = None, version: str = "") -> None:
        super().__init__(address, patience)
        tag = _STRONG_TAG.search(version)
        self._tag = None if tag is None else tag[1]

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
        system, protocols = self._system, self._system.protocol
        if self._tag is not None and "http" in protocols:
            return self._call("cat_file", self._path, start=start, end=end, headers={"If-Match": self._tag})
        if self._tag is not None and "s3" in protocols and hasattr(system, "_call_s3"):
            from fsspec.asyn import sync

            return sync(system.loop, self._s3_range, start, end, timeout=SECONDS)
        return self._call("cat_file", self._path, start=start, end=end)

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


class _Outages:
    """The servers that do not answer now: the threads that wait for one report it together."""

    def __init__(self) -> None:
        self._waits: dict[str, Wait] = {}
        self._lock = threading.Lock()

    def report(self, server: str, patience: float, reason: str) -> None:
        """Print a line now and then, while requests to a server fail."""
        with self._lock:
            wait = self._waits.setdefault(server, Wait(patience))
            wait.report(lambda: f"{server} does not answer, its requests are repeated: {reason:.200}")

    def over(self, server: str) -> None:
        if server in self._waits:
            with self._lock:
                self._waits.pop(server, None)


outages = _Outages()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the status of HTTP in an error of aiohttp or botocore, or in what caused it."""
    for each in _chain(error):
        answer = getattr(each, "response", None)
        named = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
        for status in (getattr(each, "status", None), named):
            if isinstance(status, int):
                return status
    return None


def _is_unknown_host(error: BaseException) -> bool:
    return any(
        isinstance(each, socket.gaierror) and each.errno == socket.EAI_NONAME for each in _chain(error)
    )


def _is_missing(error: FileNotFoundError) -> bool:
    """Return whether a file does not exist: fsspec's HTTP raises the same error for a server that does not answer."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    return status in (404, 410) if status is not None else not isinstance(cause, OSError | TimeoutError)
