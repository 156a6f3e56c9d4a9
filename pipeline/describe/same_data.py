"""Validation data that is also trained on."""

from __future__ import annotations

import zlib
from pathlib import Path

from ...common.errors import first_of
from ...loaders.sources import Source, files_of

_EDGE = 1 << 16
"""Bytes of a file's beginning and end that are compared. A `.beton` file ends with a digest of all."""


def trained_on(train: Source, val: Source | None) -> list[str]:
    """Return the files of the validation data that are also files of the training data: by the same name, through a
    link, or as a copy."""
    if val is None:
        return []
    theirs = files_of(train).names
    names, places = set(theirs), {place for place in map(_place, theirs) if place is not None}
    by_size: dict[int, list[str]] = {}
    for name in theirs:
        by_size.setdefault(_size(name), []).append(name)
    return [
        name
        for name in files_of(val).names
        if name in names or _place(name) in places or _has_copy(name, by_size.get(_size(name), []))
    ]


def caution(train: Source, val: Source | None) -> str:
    """Return a caution for the plan; "" if no validation data is trained on."""
    shared = trained_on(train, val)
    if not shared:
        return ""
    return (
        f"; CAUTION: the validation data has {first_of(shared, 1)}, which is also trained on: its metrics do not "
        "show how the model does on new images"
    )


def _size(name: str) -> int:
    """Return the size of a file; -1 if there is none here."""
    path = Path(name)
    return path.stat().st_size if path.is_file() else -1


def _place(name: str) -> tuple[int, int] | None:
    try:
        status = Path(name).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _has_copy(name: str, others: list[str]) -> bool:
    return _size(name) > 0 and any(_edges(name) == _edges(other) for other in others)


def _edges(name: str) -> int:
    with Path(name).open("rb") as file:
        crc = zlib.crc32(file.read(_EDGE))
        file.seek(max(_size(name) - _EDGE, 0))
        return zlib.crc32(file.read(_EDGE), crc)
