"""Files under an address: listed, read, written and removed, each complete or absent."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ..errors import DrivetrainError
from ..threads import in_order
from .addresses import Calls, MissingFileError, RemoteFile, version_of
from .files import atomic_file

_RANGE = 8 << 20  # bytes of a request
_THREADS = 8  # requests at a time, which hide each other's latency
_ROUND = 0.2  # seconds between two looks for a file
_RENAMING = frozenset({"file", "local", "memory", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs"})
"""Protocols of file systems in which a file is visible while it is written. It is renamed when it is complete; object
stores show only complete files."""


class RemoteFolder(Calls):
    """The files under the address of a store that can be written (s3, gs, …), by their names relative to it.

    All methods raise errors of the class `error` if it cannot be read or written.
    """

    def __init__(self, address: str, error: type[DrivetrainError]) -> None:
        protocol = address.partition("://")[0]
        made = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        advice = "Run the same command again when the store answers."
        super().__init__(address.rstrip("/"), error=error, advice=advice, use_listings_cache=False, **made)
        self._renames = protocol in _RENAMING

    def versions(self, inside: str = "") -> dict[str, tuple[int, str]]:
        """Return size and version of each file, or of those in the folder `inside`; see `version_of`."""
        place = self._at(inside) if inside else self._path

        def listed() -> dict[str, Any]:
            try:
                found: dict[str, Any] = self._call("find", place, detail=True)
            except FileNotFoundError:
                return {}
            return found

        found = self._tried(listed)
        start = len(self._path.rstrip("/")) + 1
        return {
            name[start:]: (int(info.get("size") or 0), version_of(info))
            for name, info in found.items()
            if info.get("type") == "file" and len(name) > start
        }

    def read(self, name: str) -> bytes | None:
        return self._content(self._at(name))

    def download(self, name: str, path: Path, size: int) -> None:
        """Copy a file of `size` bytes to `path`, which appears when it is complete."""
        source = RemoteFile(f"{self.address}/{name}")
        ranges = range(0, size, _RANGE)
        with atomic_file(path) as file:

            def copy(start: int) -> None:
                data = source.read(start, min(_RANGE, size - start))
                os.pwrite(file.fileno(), data, start)

            try:
                with closing(in_order(copy, ranges, _THREADS, "drivetrain-download")) as copied:
                    for _ in copied:
                        pass
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
        """Raise an error unless files can be written here."""
        name = f".probe-{uuid.uuid4().hex}"
        self.write(name, b"")
        self.remove([name])

    def _put(self, name: str, send: Callable[[str], Any]) -> None:
        place = self._at(name)

        def put() -> None:
            if not self._renames:
                send(place)
                return
            head, _, tail = place.rpartition("/")
            temporary = f"{head}/.{tail}.partial"
            send(temporary)
            self._call("mv", temporary, place)

        try:
            self._tried(put, doing="written")
        except MissingFileError as error:
            raise self._error(
                f"{self.address} cannot be written: {error.__cause__}. Create the bucket, or pass another address."
            ) from error

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"
