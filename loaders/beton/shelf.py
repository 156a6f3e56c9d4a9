"""Data sets of more files than a process keeps open: one process of a machine opens and compares all, and each opens
those that it uses."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from threading import Lock
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ...common.storage.addresses import is_address
from ...common.storage.shared import Arrays, forget_arrays, key_of, shared_arrays
from ...common.storage.stream import Room, Stream, mirror_at
from .open_file import Identity
from .reader import Beton, stamps

Colors = Mapping[str, Sequence[str]]
_FORMAT = 1  # of what is shared
_SOON = 600.0
"""Seconds for which files at addresses are taken to be as they were: those of the ranks of a job, which start together.
Each is compared when it is used."""


@dataclass(frozen=True)
class Facts:
    """What is known of the files of a data set, F in number, once they have been opened and compared.

    Attributes:
        identities: of each file.
        counts: `(F,)` samples of each file.
        has_checksums: whether all files have a manifest.
        checksums: `(F,)` the CRC-32 of each file's checksums; empty: not known.
        colors: the colors of each mask by class index; see `with_colors`.
    """

    identities: list[Identity]
    counts: NDArray[np.int64]
    has_checksums: bool
    checksums: NDArray[np.uint32]
    colors: Colors

    @classmethod
    def shared(cls, names: Sequence[str], away: Sequence[bool], look: Callable[[], Self]) -> Self:
        """Return what `look` finds. One process of this machine calls it, once until a file changes; of files at
        addresses (those `away`), which are not asked for changes here, once in `_SOON`.

        Raises:
            BetonError: as `look`.
        """
        within = _SOON if any(away) else math.inf
        arrays = shared_arrays(_key(names, away), lambda: look()._arrays(), within=within)
        identities, has_checksums, colors = json.loads(arrays["others"].tobytes())
        own = [tuple(each) for each in identities]
        return cls(own, arrays["counts"], has_checksums, arrays["checksums"], colors)

    def _arrays(self) -> Arrays:
        others = json.dumps([self.identities, self.has_checksums, self.colors]).encode()
        return {"others": np.frombuffer(others, np.uint8), "counts": self.counts, "checksums": self.checksums}


def with_colors(known: Colors, more: Colors) -> dict[str, list[str]]:
    """Return each mask's color of each class index, `"#rrggbb"`: as known, else that of a further file, else ""."""
    return {
        name: [one or other for one, other in zip_longest(known.get(name, ()), more.get(name, ()), fillvalue="")]
        for name in {**known, **more}
    }


def forget(names: Sequence[str], away: Sequence[bool]) -> None:
    """Let the next process that opens these files look at them."""
    forget_arrays(_key(names, away))


def at_address(name: str) -> bool:
    """Return whether a file is at an address, or the copy of one that is."""
    return is_address(name) or mirror_at(Path(name)) is not None


def _key(names: Sequence[str], away: Sequence[bool]) -> str:
    """Return a digest of what changes when a file of this machine or its manifest does."""
    own = [_place(name) if far else repr(stamps(Path(name))) for name, far in zip(names, away, strict=True)]
    return key_of("files", _FORMAT, own)


def _place(name: str) -> str:
    """Return an address, or what distinguishes a copy from one that is made in its place after it was removed."""
    if is_address(name):
        return name
    return repr((name, (stamps(Path(name))[0] or ())[:2]))


class Shelf(Sequence[Beton]):
    """The files of a data set, opened when they are used; the `most` used last stay open, and those of rows until their
    batch is loaded: a stream that is opened again is another copy, which has not what theirs has."""

    def __init__(self, open_one: Callable[[int], Beton], length: int, most: int) -> None:
        self._open_one, self._length, self._most = open_one, length, most
        self._used = OrderedDict[int, Beton]()
        self._alive = WeakValueDictionary[int, Beton]()
        self._lock = Lock()
        self.remote = False
        """Whether one that was opened is at an address; of those that stay open, none may be."""
        self.room: Room | None = None  # of those that are streamed

    def __len__(self) -> int:
        return self._length

    @property
    def open(self) -> list[Beton]:
        """Those that are open, also those of batches in preparation that were not among the last used."""
        with self._lock:
            return list(self._alive.values())

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self._length))]
        number = range(self._length)[number]
        with self._lock:
            beton = self._alive.get(number)
        return self.put(number, self._open_one(number) if beton is None else beton)

    def put(self, number: int, beton: Beton) -> Beton:
        """Keep a file open, and close the one that was not used for the longest time."""
        if (mirror := beton.file.mirror) is not None:
            self.remote = True
            self.room = mirror.room if isinstance(mirror, Stream) else self.room
        with self._lock:
            beton = self._used[number] = self._alive.setdefault(number, beton)
            self._used.move_to_end(number)
            while len(self._used) > self._most:
                self._used.popitem(last=False)
        return beton
