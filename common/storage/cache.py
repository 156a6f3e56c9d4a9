"""The folder of local copies: made atomically, found again by the next job, and removed when it grows too large."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ..checks import is_number
from ..errors import DataError
from ..exhaustion import exhaustion, is_exhaustion
from .addresses import PATIENCE, RemoteFile
from .files import cache_folder
from .locks import acquire, locked
from .mirror import BLOCK, BLOCKS, FACTS

_RECENT = 60.0  # seconds after a copy was asked for, in which it is not removed although nobody has opened it


@dataclass(frozen=True)
class Remote:
    """How files at an address are read.

    Args:
        cache: folder of the local copies. Default None: `remote` in `$DRIVETRAIN_DATA`, else in `~/.cache/drivetrain`.
        cache_limit: GB that the folder may take on disk. Copies that nobody uses are removed, the least recently used
            first. Default None: no limit.
        patience: seconds that a server may not answer before that is an error. Default: five minutes.

    Raises:
        DataError: for an invalid value.
    """

    cache: str | Path | None = None
    cache_limit: float | None = None
    patience: float = PATIENCE

    def __post_init__(self) -> None:
        if not (self.cache is None or isinstance(self.cache, str | Path)):
            raise DataError(f"cache={self.cache!r:.80} must be a folder, or None.")
        if self.cache_limit is not None and not is_number(self.cache_limit, "(0, 1e9]"):
            raise DataError(f"cache_limit={self.cache_limit!r:.80} must be a positive number of GB, or None.")
        if not is_number(self.patience, "[0, 1e9]"):
            raise DataError(f"patience={self.patience!r:.80} must be a number of seconds, 0 or more.")


def local_copy(address: str, remote: Remote = Remote()) -> Path:
    """Return the local copy of a remote `.beton` file, still empty if it is new; reading it fetches what is missing.

    The copy belongs to one version of the file, by its size and entity tag or time of change, and to one start of the
    machine, because a crash may lose blocks that were marked as written. The manifest next to it is complete.
    """
    size, version = RemoteFile(address, remote.patience).facts()
    root = cache_folder() / "remote" if remote.cache is None else Path(remote.cache)
    facts: dict[str, object] = {"address": address, "size": size, "version": version, "boot": _boot()}
    name = address.rstrip("/").rpartition("/")[2].partition("?")[0] or "data.beton"
    folder = root / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not (folder / FACTS).exists():
            manifest = _manifest(address, remote.patience)
            with locked(root / ".lock"):  # each counts the copies of the others
                _make_room(root, folder, size, remote.cache_limit)
                _make(folder, name, size, facts, manifest)
        os.utime(folder / FACTS)  # the time of its last use
    except OSError as error:
        if is_exhaustion(error):
            raise exhaustion(error, f"file descriptors for the local copy of {address}") from error
        raise DataError(
            f"The local copy of {address} cannot be made in {root}: {error.strerror or error}. Pass cache=FOLDER, a "
            "folder that you can write."
        ) from error
    return folder / name


def _manifest(address: str, patience: float) -> bytes | None:
    path, mark, query = address.partition("?")
    return RemoteFile(f"{path}.json{mark}{query}", patience).whole()


def _make(folder: Path, name: str, size: int, facts: dict[str, object], manifest: bytes | None) -> None:
    """Create the folder of a copy. Several processes may do so at the same time: the first one wins."""
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        for file, length in ((name, size), (BLOCKS, max(-(-size // BLOCK), 1))):
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
    found = sorted((path for path in root.glob("*/" + FACTS) if path.parent != folder), key=_last_use)
    others = {path: _bytes(path.parent) for path in found}
    allowed = float("inf") if limit is None else limit * 1e9

    def fits() -> bool:
        full, present = (sum(each[n] for each in others.values()) for n in (0, 1))
        return full + size <= allowed and size + full - present <= shutil.disk_usage(root).free

    for path in found:
        if fits():
            return
        if time.time() - _last_use(path) > _RECENT and _remove_unused(path):
            del others[path]
    if not fits():
        free, used = shutil.disk_usage(root).free / 1e9, sum(full for full, _ in others.values()) / 1e9
        raise DataError(
            f"A copy of {size / 1e9:,.2f} GB does not fit into {root}: {free:,.2f} GB of the disk are free, copies in "
            f"use take up to {used:,.2f} GB, and cache_limit is {'not set' if limit is None else f'{limit:g} GB'}. "
            "Pass another cache=FOLDER, or a larger cache_limit=."
        )


def _last_use(facts: Path) -> float:
    return facts.stat().st_mtime


def _bytes(folder: Path) -> tuple[int, int]:
    """Return the length of a copy's files, and what they take on disk."""
    files = [each.stat() for each in folder.iterdir()]
    return sum(each.st_size for each in files), sum(each.st_blocks * 512 for each in files)


def _remove_unused(facts: Path) -> bool:
    with (facts.parent / json.loads(facts.read_text()).get("name", FACTS)).open() as file:
        if not acquire(file, wait=False):
            return False
        facts.unlink()  # first, so that nobody takes the folder for a complete one
        shutil.rmtree(facts.parent, ignore_errors=True)
    return True


def _boot() -> str:
    """Return the name of this start of the machine; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
