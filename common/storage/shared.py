"""Arrays that all processes of a machine map, so that they are in memory once: computed by one of them, or written by
all."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..version import __version__
from .files import boot_id, locked

_KEPT = 86400.0  # seconds after the last use in which the files remain, for processes that start later
_NAMES = "names.json"  # of all arrays in a folder: without one of them, the others would mean something else

Arrays = Mapping[str, NDArray[Any]]


def key_of(*facts: Any) -> str:
    """Return a key for `shared_arrays`: a digest of JSON values on which the arrays depend. It has the version and the
    boot of the machine in it."""
    return hashlib.sha256(json.dumps([__version__, boot_id(), *facts]).encode()).hexdigest()[:32]


def shared_arrays(key: str, make: Callable[[], Arrays], *, within: float = math.inf) -> Arrays:
    """Return the arrays of `key`, read only: what another process of this machine has made, else what `make` returns.

    They are in the folder for temporary files (`TMPDIR`), for this user alone. Where they cannot be written, each
    process has its own.

    Args:
        key: a file name; a digest of all that the arrays depend on (`key_of`).
        make: returns them. Called by one process at a time.
        within: seconds after which they are made again, if what they depend on can change without another key. Default:
            never.
    """
    with ExitStack() as stack:
        folder: Path | None = None
        with suppress(OSError):
            root = _own_folder()
            stack.enter_context(locked(root / f"{key}.lock"))  # of other data, nobody is waited for
            folder = root / key
        if folder is not None and (found := _mapped(folder, within)) is not None:
            return found
        made = make()
        if folder is None:
            return made
        with suppress(OSError):  # a full disk
            _remove_unused(folder.parent)
            _write(folder, made)
            return _mapped(folder, within) or made
        return made


def forget_arrays(key: str) -> None:
    """Let the next process that asks for the arrays of `key` make them. Processes that have mapped them keep them."""
    with suppress(OSError):
        shutil.rmtree(_own_folder() / key)


def joint_array(name: str, length: int, dtype: type[Any]) -> NDArray[Any]:
    """Return an array `(length,)` that all processes of this machine which ask for this name read and write; where no
    file can be written, each has its own. Once all have it, `forget_array` removes the name."""
    size = length * np.dtype(dtype).itemsize
    try:
        descriptor = os.open(_own_folder() / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):  # writing to a file with holes on a full disk would be a signal
                os.posix_fallocate(descriptor, 0, size)
            else:  # macOS
                os.ftruncate(descriptor, size)
            return np.frombuffer(mmap.mmap(descriptor, size), dtype)
        finally:
            os.close(descriptor)
    except OSError:
        return np.empty(length, dtype)


def forget_array(name: str) -> None:
    """Remove the file of `joint_array`, whose memory remains until the last process has ended."""
    with suppress(OSError):
        (_own_folder() / name).unlink()


def _own_folder() -> Path:
    """Return this user's folder, which nobody else can write to."""
    root = Path(tempfile.gettempdir()) / f"drivetrain-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{root} belongs to others.")
    return root


def _mapped(folder: Path, within: float) -> Arrays | None:
    """Return the arrays in the folder; None if they are older than so many seconds, or one is missing, as after an
    interrupted removal, or damaged."""
    try:
        if abs(time.time() - (folder / _NAMES).stat().st_mtime) > within:
            return None
        os.utime(folder)
        names = json.loads((folder / _NAMES).read_bytes())
        mapped = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
        return {name: np.asarray(array) for name, array in mapped.items()}
    except (OSError, ValueError, EOFError):
        return None


def _remove_unused(root: Path) -> None:
    """Remove what nobody has asked for lately. Processes that have mapped it keep it."""
    for path in root.iterdir():
        with suppress(OSError):
            if abs(time.time() - path.stat().st_mtime) <= _KEPT:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:  # a lock; if somebody has it, two compute at the same time, harmlessly
                path.unlink()


def _write(folder: Path, arrays: Arrays) -> None:
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix="part-"))
    try:
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", array, allow_pickle=False)
        (part / _NAMES).write_text(json.dumps(list(arrays)))
        shutil.rmtree(folder, ignore_errors=True)  # what is left of an older one
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
