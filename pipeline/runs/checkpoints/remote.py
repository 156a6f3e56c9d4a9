"""A run at an address, such as `s3://bucket/run`, and its copy on this machine.

A run with such an `out` works in a local folder. What it writes there is uploaded: a checkpoint file by file, and last
its `state.json`, which has the digests of the others. A checkpoint at an address is therefore complete, or it has no
`state.json` and is ignored. When one is removed, its `state.json` goes first.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from ....common.errors import CheckpointError, DrivetrainError
from ....common.storage.addresses import MissingFileError, RemoteFolder, is_address
from ....common.storage.files import LockError, cache_folder, locked, write_file
from ....common.storage.json_files import ShapeError, parse
from ...models.weights import SUFFIXES
from .weights import unlisted_path

RUN, CHECKPOINTS, STATE = "run.json", "checkpoints", "state.json"
STEP = re.compile(r"step-(\d{8,})")
_ADDRESS, _SEEN, _LOCK = ".address", ".uploaded.json", ".lock"
_UNUSED = 30 * 24 * 3600.0  # seconds


class UnreachedError(CheckpointError):
    """Files of a checkpoint could not be fetched or opened, e.g. because the disk is full: they are not damaged."""


class RemoteRun:
    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address.rstrip("/")
        self.files = RemoteFolder(self.address, CheckpointError)

    @classmethod
    def create(cls, folder: Path, address: str) -> Self:
        run = cls(folder, address)
        with run._changing():
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / _ADDRESS, run.address)
        return run

    @classmethod
    def at(cls, folder: Path | None) -> Self | None:
        if folder is None or not (folder / _ADDRESS).is_file():
            return None
        return cls(folder, (folder / _ADDRESS).read_text())

    def pull(self, names: Sequence[str]) -> None:
        """Make the copy what is at the address: these files, and each `state.json`; `verify` fetches the others."""
        with self._changing(), locked(self.folder / _LOCK):  # one process at a time downloads into the copy
            there, seen = self.files.versions(), self._seen()
            for name in (*names, f"{CHECKPOINTS}/{RUN}"):
                path = self.folder / name
                if name not in there:
                    path.unlink(missing_ok=True)
                elif not path.exists() or seen.get(name) != [*_stat(path), there[name][1]]:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self.files.download(name, path)
                    seen[name] = [*_stat(path), there[name][1]]
            self._remember(seen)
            steps = self._complete(there)
            self._keep_only(steps)
            for step in steps:
                self._pull_state(step)

    def pull_checkpoint(self, step: str) -> Path:
        """Make the copy have this checkpoint, and of others those that are at the address: a machine without rank 0
        would keep all that it has ever resumed from, and what it was writing when it was killed."""
        with self._changing(), locked(self.folder / _LOCK):
            self._keep_only({step} | self._complete(self.files.versions(CHECKPOINTS)))
            for path in (self.folder / CHECKPOINTS).glob(".step-*"):
                shutil.rmtree(path, ignore_errors=True)
            self._pull_state(step)
        return self.folder / CHECKPOINTS / step

    def fetch(self, path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Download those files of a checkpoint that are not in the copy, or have another size. Raise UnreachedError if
        that fails, and CheckpointError if the address does not have them."""
        with self._changing(), locked(self.folder / _LOCK):
            for name, about in files.items():
                file, size = path / name, int(about["bytes"])
                if not file.exists() or file.stat().st_size != size:
                    try:
                        self.files.download(f"{CHECKPOINTS}/{path.name}/{name}", file)
                    except CheckpointError as error:
                        if isinstance(error.__cause__, MissingFileError):
                            raise
                        raise UnreachedError(str(error)) from error

    def newest_step(self, run: str) -> int:
        """Return the last step of the complete checkpoints of this run; those of an earlier one may still be there."""
        steps = sorted(self._complete(self.files.versions(CHECKPOINTS)), key=lambda step: int(step[5:]), reverse=True)
        texts = ((step, self.files.read(f"{CHECKPOINTS}/{step}/{STATE}")) for step in steps)
        return next((int(step[5:]) for step, text in texts if is_of_run(text, run)), -1)

    def push(self) -> None:
        """Upload the files that have changed since the last call, other than checkpoints."""
        seen = self._seen()
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if name.startswith(f"{CHECKPOINTS}/") or "/." in f"/{name}" or not path.is_file():
                continue
            stat = _stat(path)
            if seen.get(name, [])[:2] != stat:
                self.files.upload(path, name)
                seen[name] = [*stat, ""]
                self._remember(seen)

    def begin(self) -> None:
        there = self.files.versions(CHECKPOINTS)
        complete = self._complete(there)
        steps = {name.split("/")[1] for name in there if name.count("/") > 1}
        for step in sorted(steps - complete):
            self.discard(step)
        self.files.upload(self.folder / CHECKPOINTS / RUN, f"{CHECKPOINTS}/{RUN}")

    def discard(self, step: str) -> None:
        """Remove a checkpoint, its `state.json` first: without one, it is ignored."""
        place = f"{CHECKPOINTS}/{step}"
        names = sorted(self.files.versions(place), key=lambda name: name != f"{place}/{STATE}")
        self.files.remove(names)

    def send(self, step: str, paths: Mapping[str, Path]) -> None:
        """In this order; `paths` are on this machine, by their names there."""
        for name, path in paths.items():
            self.files.upload(path, f"{CHECKPOINTS}/{step}/{name}")

    def receive(self, step: str, paths: Mapping[str, Path]) -> bool:
        """Download the files that are not at `paths` yet. Return whether all are at the address."""
        there = self.files.versions(f"{CHECKPOINTS}/{step}")
        places = {f"{CHECKPOINTS}/{step}/{name}": path for name, path in paths.items()}
        for name in there.keys() & places.keys():
            if not places[name].exists():
                self.files.download(name, places[name])
        return there.keys() >= places.keys()

    def shown(self, path: Path) -> str:
        inside = path.absolute().relative_to(self.folder.absolute()).as_posix()
        return self.address if inside == "." else f"{self.address}/{inside}"

    def local(self, address: str) -> Path | None:
        plain = address.rstrip("/")
        if plain != self.address and not plain.startswith(f"{self.address}/"):
            return None
        return self.folder / plain[len(self.address) + 1 :]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Raise UnreachedError if the copy cannot be written in the block."""
        try:
            yield
        except (CheckpointError, LockError):
            raise
        except (OSError, DrivetrainError) as error:
            raise UnreachedError(
                f"The copy of {self.address} on this machine cannot be written: {str(error).rstrip('.')}. Free space "
                f"in {self.folder}, or set another folder for copies with $DRIVETRAIN_DATA."
            ) from error

    def _keep_only(self, steps: Collection[str]) -> None:
        for path in (self.folder / CHECKPOINTS).glob("step-*"):
            if path.name not in steps:
                shutil.rmtree(path)

    def _complete(self, names: Mapping[str, object]) -> set[str]:
        parts = [name.split("/") for name in names]
        return {part[1] for part in parts if len(part) == 3 and part[2] == STATE and STEP.fullmatch(part[1])}

    def _pull_state(self, step: str) -> None:
        path = self.folder / CHECKPOINTS / step
        text = self.files.read(f"{CHECKPOINTS}/{step}/{STATE}")
        if text is None or ((path / STATE).exists() and (path / STATE).read_bytes() == text):
            return
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        write_file(path / STATE, text)

    def _seen(self) -> dict[str, list[Any]]:
        """Return size, time of change and remote version of the files that are the same in both places."""
        try:
            return parse((self.folder / _SEEN).read_bytes(), dict[str, list[Any]])
        except (OSError, ShapeError):
            return {}

    def _remember(self, seen: dict[str, list[Any]]) -> None:
        write_file(self.folder / _SEEN, json.dumps(seen))


def run_name(run: str | Path) -> str:
    """Return the name of a run's folder, also of the working directory as `.`, or the last part of its address."""
    return Path(str(run) if is_address(run) else os.path.abspath(run)).name  # noqa: PTH100 - not `resolve`


def is_of_run(content: bytes | None, run: str) -> bool:
    """Return whether the content of a `run.json` or `state.json` is of this run, whose id is unique."""
    return content is not None and f'"{run}"'.encode() in content


def working_folder(address: str) -> Path:
    return cache_folder() / "runs" / _name(address)


def opened(place: str | Path, *names: str) -> Path:
    """Return a path to read from: `place` itself, or in the copy of an address, with the run's files `names`."""
    if not is_address(place):
        return Path(place)
    address, checkpoint = str(place).rstrip("/"), ""
    head, _, tail = address.rpartition("/")
    if STEP.fullmatch(tail) and head.endswith(f"/{CHECKPOINTS}"):
        address, checkpoint = head.removesuffix(f"/{CHECKPOINTS}"), tail
    elif tail.endswith(SUFFIXES):
        address, names = head, (tail, unlisted_path(Path(tail)).name)
    folder = cache_folder() / "copies" / _name(address)
    if not folder.exists():
        _remove_unused(folder.parent)
    run = RemoteRun.create(folder, address)
    run.pull(names)
    if checkpoint:
        return run.folder / CHECKPOINTS / checkpoint
    return run.folder / tail if tail.endswith(SUFFIXES) else run.folder


def _remove_unused(copies: Path) -> None:
    """Remove the copies that were not read for `_UNUSED`: the addresses have what they have."""
    for copy in copies.glob("*"):
        with suppress(OSError):  # another process removes it, too
            address = copy / _ADDRESS  # written whenever the copy is read
            if time.time() - (address if address.exists() else copy).stat().st_mtime > _UNUSED:
                shutil.rmtree(copy)


def shown(path: Path) -> str:
    """Return a path for messages: in a copy, the address."""
    for folder in (path, *path.parents[:2]):
        if (run := RemoteRun.at(folder)) is not None:
            return run.shown(path)
    return str(path)


def _name(address: str) -> str:
    plain = address.rstrip("/")
    return f"{plain.rpartition('/')[2] or 'run'}-{hashlib.sha256(plain.encode()).hexdigest()[:16]}"


def _stat(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
