"""Data sets of more files than a process keeps open: one process of a machine opens and compares all, and each opens
those that it uses."""

from __future__ import annotations

import hashlib
import json
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
from ...common.storage.files import boot_id
from ...common.storage.shared import Arrays, shared_arrays
from ...common.storage.stream import Room, Stream, mirror_at
from ...common.version import __version__
from .open_file import Identity
from .reader import Beton, stamps

Colors = Mapping[str, Sequence[str]]
_FORMAT = 1  # of what is shared


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
    def shared(cls, names: Sequence[str], look: Callable[[], Self]) -> Self:
        """Return what `look` finds. Of files on this machine, one process calls it, once until a file changes.

        Raises:
            BetonError: as `look`.
        """
        if (key := _key(names)) is None:
            return look()
        arrays = shared_arrays(key, lambda: look()._arrays())
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


def _key(names: Sequence[str]) -> str | None:
    """Return a digest of what changes when a file or its manifest does; None if not all are on this machine, or are
    copies of files that are not."""
    found = hashlib.sha256(json.dumps([__version__, _FORMAT, boot_id()]).encode())
    for name in names:
        path = Path(name)
        if is_address(name) or mirror_at(path) is not None:
            return None
        found.update(repr(stamps(path)).encode())
    return found.hexdigest()[:32]


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
