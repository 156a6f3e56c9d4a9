"""Arrays that one process of a machine computes and all of its processes map, so that they are in memory once."""

from __future__ import annotations

import json
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

from .files import locked

_KEPT = 86400.0  # seconds after the last use in which the files remain, for processes that start later
_NAMES = "names.json"  # of all arrays in a folder: without one of them, the others would mean something else

Arrays = Mapping[str, NDArray[Any]]


def shared_arrays(key: str, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of `key`, read only: what another process of this machine has made, else what `make` returns.

    They are in the folder for temporary files (`TMPDIR`), for this user alone. Where they cannot be written, each
    process has its own.

    Args:
        key: a file name; a digest of all that the arrays depend on.
        make: returns them. Called by one process at a time.
    """
    with ExitStack() as stack:
        folder: Path | None = None
        with suppress(OSError):
            root = _own_folder()
            stack.enter_context(locked(root / f"{key}.lock"))  # of other data, nobody is waited for
            folder = root / key
        if folder is not None and (found := _mapped(folder)) is not None:
            return found
        made = make()
        if folder is None:
            return made
        with suppress(OSError):  # a full disk
            _remove_unused(folder.parent)
            _write(folder, made)
            return _mapped(folder) or made
        return made


def _own_folder() -> Path:
    """Return this user's folder, which nobody else can write to."""
    root = Path(tempfile.gettempdir()) / f"drivetrain-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{root} belongs to others.")
    return root


def _mapped(folder: Path) -> Arrays | None:
    """Return the arrays in the folder; None if one is missing, as after an interrupted removal, or damaged."""
    try:
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
