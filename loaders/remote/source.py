"""A file at an address: its size, its version, and ranges of its bytes, by fsspec, with time limits and retries."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import DataError, MissingExtra, require

SECONDS = 30.0
"""Time limit of one request. A request is at most 8 MiB, so less than 0.3 MB/s counts as a stall."""
ATTEMPTS = 5
"""Requests for one range before the source is given up."""
_PAUSE = 0.2  # seconds before the second attempt; doubled before each further one

# What file systems call the entity tag, digest or time of change of a file.
_VERSIONS = (
    "ETag", "etag", "Content-MD5", "Digest", "md5Hash", "crc32c", "Last-Modified", "LastModified", "last_modified",
    "updated", "mtime", "created",
)  # fmt: skip


def is_address(source: str | Path) -> bool:
    """Return whether a data source is an address, such as `s3://bucket/train.beton`, and not a path."""
    return isinstance(source, str) and "://" in source


class MissingFileError(DataError):
    """There is no file at an address."""


class RemoteFile:
    """A file that is read in ranges.

    Args:
        address: a URL that fsspec knows: http, https, s3, gs, hf, …

    Raises:
        DataError: if no file system has such addresses.
        MissingExtra: if fsspec, or what it needs for this protocol, is not installed.
    """

    def __init__(self, address: str) -> None:
        self.address, self._closed = address, threading.Event()
        fsspec = require("fsspec", "remote", "read data at an address")
        try:
            self._system, self._path = fsspec.core.url_to_fs(address)
        except ImportError as error:
            raise MissingExtra(f"{address} cannot be read: {error}.") from error
        except ValueError as error:
            raise DataError(f"{address} cannot be read: {error}. Pass an address or a path.") from error

    def close(self) -> None:
        """Do not repeat requests that fail from now on."""
        self._closed.set()

    def facts(self) -> tuple[int, str]:
        """Return the file's size in bytes, and what changes with its content: its entity tag or time of change.

        Raises:
            DataError: if there is no such file, its size is unknown, or the source does not answer.
        """
        info = self._tried(lambda: self._call("info"), lambda _: "")
        size = info.get("size")
        if not isinstance(size, int):
            raise DataError(f"{self.address} has no known size: its source does not tell the length.")
        return size, " ".join(f"{name}={info[name]}" for name in _VERSIONS if info.get(name))

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes that begin at `start`.

        Raises:
            DataError: if they do not arrive in `ATTEMPTS` requests.
        """

        def wrong(data: bytes) -> str:
            if len(data) > size:
                raise DataError(
                    f"{self.address} cannot be read in ranges: its server sent {len(data):,} bytes when asked for "
                    f"{size:,}. Copy the file to this machine, or serve it with range requests."
                )
            return "" if len(data) == size else f"only {len(data):,} of {size:,} bytes arrived"

        data: bytes = self._tried(lambda: self._call("cat_file", start=start, end=start + size), wrong)
        return data

    def whole(self) -> bytes | None:
        """Return the full content of a small file; None if it does not exist.

        Raises:
            DataError: as `read`.
        """
        try:
            data: bytes = self._tried(lambda: self._call("cat_file"), lambda _: "")
        except MissingFileError:
            return None
        return data

    def _call(self, name: str, **options: Any) -> Any:
        """Call a method of the file system, with a time limit where it works asynchronously."""
        if not self._system.async_impl:
            return getattr(self._system, name)(self._path, **options)
        from fsspec.asyn import sync

        method = getattr(self._system, f"_{name}")
        return sync(self._system.loop, method, self._path, timeout=SECONDS, **options)

    def _tried(self, request: Callable[[], Any], wrong: Callable[[Any], str]) -> Any:
        """Return the result of a request, which is repeated while it fails or `wrong` has a complaint."""
        cause: Exception | None = None
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                # Ranks that failed together do not ask again together.
                pause = _PAUSE * 2 ** (attempt - 1) * random.SystemRandom().uniform(0.5, 1.5)
                if self._closed.wait(pause):
                    break
            try:
                result = request()
            except FileNotFoundError as error:
                if _is_missing(error):
                    raise MissingFileError(f"{self.address} does not exist.") from error
                cause, reason = error, f"{type(error.__cause__).__name__}: {error.__cause__}"
                continue
            except PermissionError as error:
                raise DataError(
                    f"{self.address} cannot be read: {error}. Check the credentials in the environment."
                ) from error
            except ImportError as error:
                raise MissingExtra(f"{self.address} cannot be read: {error}.") from error
            except Exception as error:  # each file system has its own
                cause, reason = error, f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if not (reason := wrong(result)):
                return result
        raise DataError(
            f"{self.address} cannot be read: {ATTEMPTS} requests failed, the last one with: {reason}. Run the same "
            "command again when the source answers: what has arrived is kept."
        ) from cause


def _is_missing(error: FileNotFoundError) -> bool:
    """Return whether a file does not exist: fsspec's HTTP raises the same error for a server that does not answer."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    return status in (404, 410) if status is not None else not isinstance(cause, OSError | TimeoutError)
