"""What is at an address: requests by fsspec, with time limits and retries, and ranges of a file's bytes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from ...errors import DataError, DrivetrainError, MissingExtra, require

SECONDS = 30.0
"""Time limit of one request of at most 8 MiB; for longer ones see `SLOWEST`."""
SLOWEST = 0.3e6
"""Bytes per second. What is slower counts as a stall."""
ATTEMPTS = 5
"""Requests for one range before the source is given up."""
_PAUSE = 0.2  # seconds before the second attempt; doubled before each further one

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
    """An address without a file."""


class Calls:
    """What reads or writes at an address.

    Args:
        address: a URL that fsspec knows: http, https, s3, gs, hf, …
        options: of the file system.

    Attributes:
        ERROR: what is raised.
        ADVICE: the end of the message when requests have failed.

    Raises:
        DrivetrainError: if no file system has such addresses.
        MissingExtra: if fsspec, or what it needs for this protocol, is not installed.
    """

    ERROR: ClassVar[type[DrivetrainError]] = DataError
    ADVICE: ClassVar[str] = "Run the same command again when the source answers: what has arrived is kept."

    def __init__(self, address: str, **options: Any) -> None:
        self.address, self._closed = address, threading.Event()
        fsspec = require("fsspec", "remote", "read data at an address")
        try:
            self._system, self._path = fsspec.core.url_to_fs(address, **options)
        except ImportError as error:
            raise MissingExtra(f"{address} cannot be read: {error}.") from error
        except ValueError as error:
            raise self.ERROR(f"{address} cannot be read: {error}. Pass an address or a path.") from error

    def close(self) -> None:
        """Do not repeat requests that fail from now on."""
        self._closed.set()

    def _content(self, path: str) -> bytes | None:
        """Return the content of a file of this file system; None if it does not exist."""
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
        self,
        request: Callable[[], Any],
        wrong: Callable[[Any], str] = lambda _: "",
        *,
        doing: str = "read",
        attempts: int | None = None,
    ) -> Any:
        """Return the result of a request, which is repeated while it fails or `wrong` has a complaint."""
        cause: Exception | None = None
        attempts, reason = attempts or ATTEMPTS, ""
        for attempt in range(attempts):
            if attempt:
                # Ranges that failed together do not ask again together.
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
                raise self.ERROR(
                    f"{self.address} cannot be {doing}: {error}. Check the credentials in the environment."
                ) from error
            except ImportError as error:
                raise MissingExtra(f"{self.address} cannot be {doing}: {error}.") from error
            except Exception as error:  # each file system has its own
                cause, reason = error, f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if not (reason := wrong(result)):
                return result
        raise self.ERROR(
            f"{self.address} cannot be {doing}: {attempts} requests failed, the last one with: {reason}. {self.ADVICE}"
        ) from cause


class RemoteFile(Calls):
    """A file that is read in ranges.

    Args:
        address: see `Calls`.
    """

    def facts(self) -> tuple[int, str]:
        """Return the file's size in bytes, and what changes with its content: its entity tag or time of change.

        Raises:
            DataError: if there is no such file, its size is unknown, or the source does not answer.
        """
        info = self._tried(lambda: self._call("info", self._path))
        size = info.get("size")
        if not isinstance(size, int):
            raise DataError(f"{self.address} has no known size: its source does not tell the length.")
        return size, version_of(info)

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

        data: bytes = self._tried(
            lambda: self._call("cat_file", self._path, start=start, end=start + size), wrong
        )
        return data

    def whole(self) -> bytes | None:
        """Return the full content of a small file; None if it does not exist.

        Raises:
            DataError: as `read`.
        """
        return self._content(self._path)


def _is_missing(error: FileNotFoundError) -> bool:
    """Return whether a file does not exist: fsspec's HTTP raises the same error for a server that does not answer."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    return status in (404, 410) if status is not None else not isinstance(cause, OSError | TimeoutError)
