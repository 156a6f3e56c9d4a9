"""WebDataset tar shards as a source: an index of offsets, made in one pass over the headers."""

from __future__ import annotations

import glob
import io
import json
import re
import tarfile
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError

IMAGE_MEMBERS = ("jpg", "jpeg", "png", "webp")
LABEL_MEMBERS = ("cls", "json")
LABEL_KEYS = ("label", "cls", "class")
_BLOCK = 512
_ABSENT = -1

Members = dict[str, tuple[int, int]]
"""Extension to offset and size of a sample's members."""


def is_shards(source: Any) -> bool:
    """Whether this names tar shards: a text or path that ends in `.tar`, or a list of such."""
    if isinstance(source, str | Path):
        return str(source).endswith(".tar") and not Path(source).is_dir()
    return isinstance(source, list | tuple) and bool(source) and all(
        isinstance(part, str | Path) and is_shards(part) for part in source
    )  # fmt: skip


def expand_shards(source: Any) -> list[str]:
    """The shards' paths: `{000..003}` counts with leading zeros, `{a,b}` lists, `*`, `?` and `[…]` match files.

    Raises:
        DataError: for a pattern that matches nothing, or a shard that is not there.
    """
    patterns = [str(source)] if isinstance(source, str | Path) else [str(part) for part in source]
    paths = []
    for pattern in (part for whole in patterns for part in _braces(whole)):
        found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))  # noqa: PTH207 — any root
        if not found:
            raise DataError(f"{pattern} does not exist. Give a .tar, a pattern of them, or a list.")
        paths += found
    return paths


def _braces(pattern: str) -> Iterator[str]:
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span:
        width = len(span[1])
        options = [f"{number:0{width}}" for number in range(int(span[1]), int(span[2]) + 1)]
    else:
        options = match[1].split(",")
    for option in options:
        yield from _braces(pattern[: match.start()] + option + pattern[match.end() :])


class TarSource:
    """Samples of tar shards: members of one key, such as `0001.jpg`, `0001.cls` and `0001.npy`.

    The image is a `.jpg`, `.jpeg`, `.png` or `.webp`. The label is a `.cls` (a number as text) or else a
    `.json`: a number, a list, or an object with `label`, `cls` or `class`. Further fields are named by
    their extension: `.json` is parsed, `.npy` is an array, `.cls` a number, all others are bytes.

    Raises:
        DataError: for a shard that is missing, truncated or no tar, or holds one member twice.
    """

    kind = "tar shards"
    classes: list[str] = []  # noqa: RUF012 — shards name none, and none is ever added

    def __init__(self, source: Any, fields: Sequence[str] = ()) -> None:
        self._shards = expand_shards(source)
        self._fields = [name.removeprefix(".").lower() for name in fields]
        self._starts, self._keys = array("q"), list[str]()
        self._kinds = bytearray()  # of each sample: which image and label extension it has
        self._places = array("q")  # of each sample: offset and size of image, label and each field
        self._width = 2 * (2 + len(self._fields))
        for shard in self._shards:
            self._starts.append(len(self._keys))
            for key, members in _index(shard).items():
                self._add(key, members)

    def _add(self, key: str, members: Members) -> None:
        image = next((end for end in IMAGE_MEMBERS if end in members), None)
        label = next((end for end in LABEL_MEMBERS if end in members), None)
        self._keys.append(key)
        self._kinds.append(LABEL_MEMBERS.index(label) if label else 0)
        for end in (image, label, *self._fields):
            self._places.extend(members.get(end, (_ABSENT, 0)) if end else (_ABSENT, 0))

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, index: int) -> tuple[Any, ...]:
        label = LABEL_MEMBERS[self._kinds[index]]
        wanted = [(None, f"image ({', '.join(IMAGE_MEMBERS)})"), (label, "label (.cls or .json)")]
        wanted += [(name, f"member .{name}") for name in self._fields]
        places = self._places[index * self._width : (index + 1) * self._width]
        values = []
        try:
            with open(self._shard(index), "rb") as file:  # noqa: PTH123 — once a sample
                for number, (end, what) in enumerate(wanted):
                    offset, size = places[2 * number : 2 * number + 2]
                    if offset == _ABSENT:
                        raise DataError(f"it has no {what}")
                    file.seek(offset)
                    data = file.read(size)
                    if len(data) < size:
                        raise DataError("its shard has become shorter since the conversion began")
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
    """The members of a shard by key, from its headers alone."""
    samples: dict[str, Members] = {}
    try:
        size = Path(shard).stat().st_size
        with tarfile.open(shard, "r:") as tar:
            while (member := tar.next()) is not None:
                vars(tar)["members"].clear()  # it would keep them all
                if member.isfile():
                    _add_member(shard, samples, member)
                if member.offset_data + member.size > size:
                    raise DataError(f"{shard} is truncated within its member {member.name}. Fetch it again.")
            end = tar.offset
        with Path(shard).open("rb") as file:
            file.seek(end)
            if file.read(_BLOCK) != bytes(_BLOCK):  # tarfile takes a damaged header for the end
                raise DataError(f"{shard} is truncated or damaged at byte {end}. Fetch it again.")
    except (tarfile.TarError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{shard} is truncated, or no tar file ({error}). Fetch it again.") from None
    except OSError as error:
        raise DataError(f"{shard} cannot be read: {error.strerror}.") from None
    return samples


def _add_member(shard: str, samples: dict[str, Members], member: tarfile.TarInfo) -> None:
    folder, _, base = member.name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not dot or not stem:
        return  # no key, as WebDataset has it
    members = samples.setdefault(f"{folder}/{stem}" if folder else stem, {})
    if extension.lower() in members:
        raise DataError(f"{shard} holds the member {member.name} twice. Make it anew.")
    members[extension.lower()] = (member.offset_data, member.size)


def _parse(data: bytes, extension: str | None) -> Any:
    try:
        if extension == "cls" and data.strip().lstrip(b"-").isdigit():
            return int(data)  # JSON knows no leading zeros
        if extension in ("json", "cls"):
            return json.loads(data)
        if extension is not None and extension.rpartition(".")[2] == "npy":
            return np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # numpy's reader raises whatever a damaged file leads it to
        raise DataError(f"its member .{extension} cannot be read: {error}") from None
    return data


def _label(label: Any) -> Any:
    if not isinstance(label, dict):
        return label
    for key in LABEL_KEYS:
        if key in label:
            return label[key]
    raise DataError(f"its .json has the keys {sorted(label)}; one of {LABEL_KEYS} is needed")
