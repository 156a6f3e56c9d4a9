"""WebDataset tar shards as a source: an index of offsets, built in one pass over the headers."""

from __future__ import annotations

import glob
import io
import json
import tarfile
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import DataError
from ..sources import expand

IMAGE_MEMBERS = ("jpg", "jpeg", "png", "webp")
LABEL_MEMBERS = ("cls", "mask.png", "json")
LABEL_KEYS = ("label", "cls", "class")
_BLOCK = 512
_ABSENT = -1

Members = dict[str, tuple[int, int]]
"""Maps extension to offset and size, for the members of a sample."""


def is_shards(source: Any) -> bool:
    """Whether `source` names tar shards: a string or path that ends in `.tar`, or a list of them."""
    if isinstance(source, str | Path):
        return str(source).endswith(".tar") and not Path(source).is_dir()
    return isinstance(source, list | tuple) and bool(source) and all(
        isinstance(part, str | Path) and is_shards(part) for part in source
    )  # fmt: skip


def expand_shards(source: Any) -> list[str]:
    """Return the shards' paths: `{000..003}` counts with leading zeros, `{a,b}` lists; `*`, `?`, `[…]` match files.

    Raises:
        DataError: for a pattern that matches nothing, or a missing shard.
    """
    patterns = [str(source)] if isinstance(source, str | Path) else [str(part) for part in source]
    paths = []
    for pattern in (part for whole in patterns for part in expand(whole)):
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))  # noqa: PTH207 — any root
        if not matches:
            raise DataError(f"{pattern} does not exist. Pass a .tar file, a pattern, or a list.")
        paths += matches
    return paths


class TarSource:
    """Samples of tar shards: members with the same key, such as `0001.jpg`, `0001.cls` and `0001.npy`.

    The image is a `.jpg`, `.jpeg`, `.png` or `.webp`. The label is a `.cls` (a number as text), else a
    `.mask.png` (a mask, unless that is a further field), else a `.json`: a number, a list, or an object with `label`,
    `cls` or `class`. Further fields are named by their extension: `.json`
    is parsed, `.npy` is an array, `.cls` a number, all others are bytes.

    Raises:
        DataError: for a shard that is missing, truncated or not a tar file, or contains one member twice.
    """

    kind = "tar shards"
    classes: list[str] = []  # noqa: RUF012 — shards have no names, and nothing is ever added

    def __init__(self, source: Any, fields: Sequence[str] = ()) -> None:
        self._shards = expand_shards(source)
        self._fields = [name.removeprefix(".").lower() for name in fields]
        self._labels = [end for end in LABEL_MEMBERS if end != "mask.png" or end not in self._fields]
        self._starts, self._keys = array("q"), list[str]()
        self._kinds = bytearray()  # per sample: which image and label extension it has
        self._places = array("q")  # per sample: offset and size of image, label and each field
        self._width = 2 * (2 + len(self._fields))
        for shard in self._shards:
            self._starts.append(len(self._keys))
            for key, members in _index(shard).items():
                self._add(key, members)

    def _add(self, key: str, members: Members) -> None:
        image = next((end for end in IMAGE_MEMBERS if end in members), None)
        label = next((end for end in self._labels if end in members), None)
        self._keys.append(key)
        self._kinds.append(LABEL_MEMBERS.index(label) if label else 0)
        for end in (image, label, *self._fields):
            self._places.extend(members.get(end, (_ABSENT, 0)) if end else (_ABSENT, 0))

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, index: int) -> tuple[Any, ...]:
        label = LABEL_MEMBERS[self._kinds[index]]
        wanted = [(None, f"image ({', '.join(IMAGE_MEMBERS)})"), (label, "label (.cls, .mask.png or .json)")]
        wanted += [(name, f"member .{name}") for name in self._fields]
        places = self._places[index * self._width : (index + 1) * self._width]
        values = []
        try:
            with open(self._shard(index), "rb") as file:  # noqa: PTH123 — called per sample
                for number, (end, what) in enumerate(wanted):
                    offset, size = places[2 * number : 2 * number + 2]
                    if offset == _ABSENT:
                        raise DataError(f"it has no {what}")
                    file.seek(offset)
                    data = file.read(size)
                    if len(data) < size:
                        raise DataError("its shard was truncated during the conversion")
                    values.append(_parse(data, end))
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from None
        values[1] = _label(values[1])
        return tuple(values)

    def describe(self, index: int) -> str:
        return f"{self._shard(index)}: key {self._keys[index]}"

    def _shard(self, index: int) -> str:
        return self._shards[bisect_right(self._starts, index) - 1]


def _index(shard: str) -> dict[str, Members]:
    """Return the members of a shard by key, reading only its headers."""
    samples: dict[str, Members] = {}
    try:
        size = Path(shard).stat().st_size
        with tarfile.open(shard, "r:") as tar:
            while (member := tar.next()) is not None:
                vars(tar)["members"].clear()  # otherwise it keeps all of them
                if member.isfile():
                    _add_member(shard, samples, member)
                if member.offset_data + member.size > size:
                    raise DataError(
                        f"{shard} is truncated within its member {member.name}. Download it again."
                    )
            end = tar.offset
        with Path(shard).open("rb") as file:
            file.seek(end)
            if file.read(_BLOCK) != bytes(_BLOCK):  # tarfile takes a damaged header for the end
                raise DataError(f"{shard} is truncated or damaged at byte {end}. Download it again.")
    except (tarfile.TarError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{shard} is truncated or not a tar file ({error}). Download it again.") from None
    except OSError as error:
        raise DataError(f"{shard} cannot be read: {error.strerror}.") from None
    return samples


def _add_member(shard: str, samples: dict[str, Members], member: tarfile.TarInfo) -> None:
    folder, _, base = member.name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or not stem:
        return  # without a key, ignored as in WebDataset
    members = samples.setdefault(f"{folder}/{stem}" if folder else stem, {})
    if extension.lower() in members:
        raise DataError(f"{shard} contains the member {member.name} twice. Recreate the shard.")
    members[extension.lower()] = (member.offset_data, member.size)


def _parse(data: bytes, extension: str | None) -> Any:
    try:
        if extension == "cls" and data.strip().lstrip(b"-").isdigit():
            return int(data)  # JSON does not allow leading zeros
        if extension in ("json", "cls"):
            return json.loads(data)
        if extension is not None and extension.rpartition(".")[2] == "npy":
            return np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # damaged files make numpy's reader raise many types
        raise DataError(f"its member .{extension} cannot be read: {error}") from None
    return data


def _label(label: Any) -> Any:
    if not isinstance(label, dict):
        return label
    for key in LABEL_KEYS:
        if key in label:
            return label[key]
    raise DataError(f"its .json has the keys {sorted(label)}; expected one of {LABEL_KEYS}")
