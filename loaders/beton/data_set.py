"""One or several `.beton` files, read as one data set: their samples one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common import machine
from ...common.errors import BetonError
from ...common.exhaustion import more_descriptors
from ...common.storage.cache import Remote
from ...common.storage.shared import key_of, shared_arrays
from ...common.storage.stream import Stream
from ..sources import Files, Source, files_of, in_threads
from .labels import FORMAT as LABELS
from .labels import LabelFacts
from .manifest import joined
from .open_file import Identity
from .reader import Beton, open_beton
from .shelf import Facts, Shelf, at_address, forget, with_colors
from .tables import Rows

Indices = NDArray[np.int64]

CHECKED = 1 << 18
"""Samples of a data set that are all checked when it is opened, in about 0.3 s; of a larger one those that are used."""
MOST_OPEN = 1024
"""Files of a data set that are open at a time, and take a descriptor: of more, those that were used last."""
_TIMES = 4  # as many are open at most, with those that are being checked, and those of batches in preparation
_AT_ONCE = 1 << 16  # labels read at a time
_KNOWN = 256  # samples of a larger one whose sizes stand for all


def _joined(name: str) -> cached_property[NDArray[Any]]:
    """Return a property of `BetonFiles`: the arrays of this name of all files, as one."""

    def join(own: BetonFiles) -> NDArray[Any]:
        arrays = [np.asarray(getattr(one, name)) for one in own.files]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)  # a single one is not copied

    return cached_property(join)


class BetonFiles:
    """The samples of several files with the same fields and classes, numbered through in the files' order. What it
    shares with `Beton` is the same in all files, or the arrays of all samples, `(N,)`."""

    def __init__(self, files: Files, betons: Sequence[Beton], facts: Facts) -> None:
        self.files, self.name, self._facts = betons, str(files), facts
        self.identities, self.has_checksums = facts.identities, facts.has_checksums
        # The index of each file's first sample, and then the number of all samples
        self.starts = np.append(0, np.cumsum(facts.counts))
        self.parts: tuple[tuple[float, int, int], ...] = ()  # weight, first and end of each data set of a mix
        if files.weights is not None:
            ends = np.cumsum([0, *(len(part.files) for part in files.parts)])
            bounds = self.starts[ends].tolist()
            self.parts = tuple(zip(files.weights, bounds[:-1], bounds[1:], strict=True))
        first = self.files[0]
        self.fields, self.targets, self.classes = first.fields, first.targets, first.classes
        self.channels, self.depth, self.label_name = first.channels, first.depth, first.label_name
        self.lazy = isinstance(betons, Shelf) or any(one.tables is not None for one in betons)
        """Whether samples are checked when they are used. Then the arrays `(N,)` are of all samples only if needed."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def colors(self, name: str) -> tuple[str, ...]:
        """Return the color of each class index in a mask, `"#rrggbb"`: that of the first file which has one, or ""."""
        return tuple(self._facts.colors.get(name, ()))

    modes, widths, heights = _joined("modes"), _joined("widths"), _joined("heights")
    pointers, sizes = _joined("pointers"), _joined("sizes")
    _label_arrays = _joined("labels")

    @cached_property
    def _all(self) -> Rows:
        """What `rows` returns, of all samples."""
        descriptors = np.array([one.file.descriptor for one in self.files], dtype=np.int32)
        return Rows(
            np.repeat(descriptors, np.diff(self.starts)), self.modes.astype(np.int32), self.widths, self.heights,
            self.pointers, self.sizes,
        )  # fmt: skip

    def rows(self, indices: Indices) -> Rows:
        """Return what the native core has to know of the samples `indices` `(n,)`."""
        if not self.lazy:
            return self._all.part(indices)
        by_file = [(one, at, one.rows(own)) for one, at, own in self._by_file(indices)]
        files = tuple(one for one, _, _ in by_file)
        if len(by_file) == 1:
            return replace(by_file[0][2], files=files)
        back = np.argsort(np.concatenate([at for _, at, _ in by_file]))
        columns = zip(*(rows.columns for _, _, rows in by_file), strict=True)
        return Rows(*(np.concatenate(column)[back] for column in columns), files=files)

    @cached_property
    def known(self) -> Rows:
        """The rows of all samples; of a data set that is checked when used, those of some, evenly taken."""
        if not self.lazy:
            return self._all
        some = self.rows(np.linspace(0, len(self) - 1, _KNOWN).astype(np.int64))
        return replace(some, files=())  # which need not stay open

    @cached_property
    def labels(self) -> NDArray[Any]:
        """`(N,)` or `(N, K)`, as `Beton.labels`; raises `BetonError` if they are masks."""
        if (kind := self.fields[self.label_name]) in ("int", "float"):
            return self._read_labels(np.dtype(np.int64 if kind == "int" else np.float64))
        return self._label_arrays

    @cached_property
    def label_facts(self) -> LabelFacts:
        """What is known of all labels. Those of a large data set are read by one process of this machine.

        Raises:
            BetonError: as `Beton.labels`.
        """
        if not self.shareable or self.label_name in self.targets:
            return LabelFacts.of([self.labels])
        key = key_of("labels", LABELS, len(self), self.checksum, self.label_name)
        return LabelFacts.shared(shared_arrays(key, lambda: self._read_facts().arrays()))

    def _read_facts(self) -> LabelFacts:
        facts = LabelFacts.of(self.read(self.label_name, own) for own in self._all_indices())
        if facts.shape and not facts.finite:
            _ = self._label_arrays  # which raises, and names the sample
        return facts

    def compact_labels(self) -> NDArray[Any] | None:
        """Return `labels`; indices of classes with names in the smallest type that has all, read some at a time and not
        kept. None if they are masks."""
        if self.label_name in self.targets:
            return None
        if self.fields[self.label_name] != "int" or not self.classes:
            return self.labels
        return self._read_labels(np.min_scalar_type(len(self.classes) - 1))

    def _read_labels(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        found = np.empty(len(self), dtype)
        for some in self._all_indices():
            found[some] = self.read(self.label_name, some)
        return found

    def _all_indices(self) -> Iterator[Indices]:
        """Yield the indices of all samples, some at a time."""
        for start in range(0, len(self), _AT_ONCE):
            yield np.arange(start, min(start + _AT_ONCE, len(self)))

    @cached_property
    def checksum(self) -> int | None:
        """The CRC-32 of all samples' checksums, in order; None if a file has no manifest."""
        if not self.has_checksums:
            return None
        if len(known := self._facts.checksums):
            return joined(zip((4 * np.diff(self.starts)).tolist(), known.tolist(), strict=True))
        return reduce(lambda before, one: one.all_checksums(before), self.files, 0)

    @property
    def shareable(self) -> bool:
        """Whether what a process of a machine computes from all samples is kept for the others: the data set is large,
        and its checksum known."""
        return self.lazy and self.checksum is not None

    @cached_property
    def pages(self) -> NDArray[np.int64]:
        """`(N,)` the page that each sample is on, numbered through all files."""
        pages, first = [], 0
        for one in self.files:
            pages.append(np.asarray(one.pointers).astype(np.int64) // one.page_size + first)
            first = int(pages[-1].max()) + 1
        return np.concatenate(pages)

    @property
    def samples_on_a_page(self) -> int:
        """About so many samples that follow each other are on one page of a file."""
        return max(self.files[0].page_size * len(self) // self._bytes, 1)

    @property
    def _bytes(self) -> int:
        return sum(size for _, _, size in self.identities)

    def read(self, name: str, indices: Indices) -> Any:
        if len(self.files) == 1:
            return self.files[0].read(name, indices)
        read = [(at, one.read(name, own)) for one, at, own in self._by_file(np.asarray(indices))]
        if read and isinstance(read[0][1], np.ndarray):
            array = np.empty((len(indices), *read[0][1].shape[1:]), read[0][1].dtype)
            for at, values in read:
                array[at] = values
            return array
        found: list[Any] = [None] * len(indices)
        for at, values in read:
            for place, value in zip(at.tolist(), values, strict=True):
                found[place] = value
        return found

    def prefetch(
        self,
        indices: Indices,
        soon: NDArray[np.float32] | None = None,
        later: NDArray[np.float32] | None = None,
    ) -> None:
        if self.remote or self.exceeds_memory:
            for one, at, own in self._by_file(indices):
                times = () if soon is None or later is None else (soon[at], later[at])
                one.prefetch(own, *times, local=self.exceeds_memory)

    @contextmanager
    def prepared(self, indices: Indices) -> Iterator[None]:
        with ExitStack() as stack:
            if self.remote:
                for one, _, own in self._by_file(indices):
                    stack.enter_context(one.prepared(own))
            yield

    def are_unchanged(self, indices: Indices, images: NDArray[np.uint32]) -> bool:
        return all(one.are_unchanged(own, images[at]) for one, at, own in self._by_file(indices))

    @cached_property
    def remote(self) -> bool:
        if isinstance(self.files, Shelf):
            return self.files.remote
        return any(one.file.mirror is not None for one in self.files)

    @cached_property
    def room(self) -> int | None:
        """The bytes that this process may keep of the files, if it streams them."""
        if isinstance(self.files, Shelf):
            return None if self.files.room is None else self.files.room.size
        mirrors = (one.file.mirror for one in self.files)
        return next((each.room.size for each in mirrors if isinstance(each, Stream)), None)

    @cached_property
    def exceeds_memory(self) -> bool:
        """Whether the files are larger than the free memory, so that the system cannot keep what it has read."""
        return self._bytes > machine.free_memory()

    @property
    def _open(self) -> Sequence[Beton]:
        return self.files.open if isinstance(self.files, Shelf) else self.files

    def require_sizes(self) -> None:
        for one in self._open:
            one.file.require_size()

    def require_identities(self, identities: list[Identity]) -> None:
        for number, (own, identity) in enumerate(zip(self.identities, identities, strict=True)):
            if own != identity:
                self.files[number].file.require_identity(identity)

    def close(self) -> None:
        """End what `prefetch` has begun. The files stay open."""
        for one in self._open:
            one.close()

    def locate(self, index: int) -> tuple[Beton, int]:
        """Return the file of a sample, and its index in it."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.files[number], index - int(self.starts[number])

    def _by_file(self, indices: Indices) -> Iterator[tuple[Beton, Indices, Indices]]:
        """Yield each file that has some of the samples, their places in `indices`, and their indices in the file."""
        if len(self.files) == 1:
            yield self.files[0], np.arange(len(indices)), indices
            return
        numbers = np.searchsorted(self.starts, indices, side="right") - 1
        for number in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == number)
            yield self.files[number], at, indices[at] - self.starts[number]


class _Checks:
    """Compare each file of a data set with the first one and the one before."""

    def __init__(self) -> None:
        self._first: tuple[Path, dict[str, Any]] | None = None  # of it, what is compared: it need not stay open
        self._before: tuple[Path, dict[str, Any]] | None = None
        self._identities, self._counts, self._colors = list[Identity](), list[int](), dict[str, list[str]]()
        self.has_checksums = True

    def __call__(self, one: Beton) -> None:
        self.alike(one)
        self.has_checksums &= one.checksums is not None
        self._identities.append(one.file.identity)
        self._counts.append(len(one))
        self._colors = with_colors(self._colors, one.colors)
        if self._before is not None and not _follows(one.manifest.get("shard"), self._before[1]):
            wrong = f"{one.path} does not follow {self._before[0]}: they are from different conversions."
            raise BetonError(f"{wrong} Convert the data again.")
        self._before = one.path, {key: one.manifest[key] for key in ("shard", "seal") if key in one.manifest}

    def facts(self, checksums: Sequence[int]) -> Facts:
        """Return what is known of the files, with the CRC-32 of each file's checksums if they are known."""
        counts = np.array(self._counts, np.int64)
        return Facts(self._identities, counts, self.has_checksums, np.array(checksums, np.uint32), self._colors)

    def alike(self, one: Beton) -> None:
        """Compare a file with the first one only: files are used in any order."""
        own = {"fields": _types(one), "targets": one.targets, "classes": one.manifest.get("classes", [])}
        path, first = self._first = self._first or (one.path, own)
        for what, there in first.items():
            if own[what] != there:
                raise BetonError(
                    f"{one.path} has the {what} {_brief(own[what])}, and {path} has {_brief(there)}. Files of one "
                    f"data set, and of a mix, must have the same {what} in the same order. Convert them alike "
                    "(classes=, fields=)."
                )
        if "classes" in one.manifest:
            one.manifest["classes"] = first["classes"]  # once in memory


def _follows(shard: Any, before: dict[str, Any]) -> bool:
    """Return whether the conversion wrote a file after the one with the manifest `before`. True if that is not known:
    for other files, and where files between the two were left out."""
    known = isinstance(shard, dict) and isinstance(before.get("shard"), dict)
    return not known or shard["number"] != before["shard"]["number"] + 1 or shard["follows"] == before["seal"]


def _types(beton: Beton) -> dict[str, str]:
    return {name: str(column.field) for name, column in beton.columns.items()}


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def open_files(source: Source, remote: Remote = Remote()) -> BetonFiles:  # noqa: B008  frozen
    """Open a data source: a `.beton` file, a pattern such as `train-{000..127}.beton`, or several with weights.

    Each open file takes a descriptor, and so does its manifest: where needed, the process's soft limit is raised until
    they are closed. Of more files than `MOST_OPEN`, each is opened once to be checked, by one process of the machine,
    and again when it is used.
    """
    files = files_of(source)
    names, most, check = files.names, CHECKED // len(files.names), _Checks()

    def open_one(number: int) -> Beton:
        return open_beton(names[number], remote, most)

    with more_descriptors(2 * min(len(names), _TIMES * MOST_OPEN)) as keep:  # of each file and its manifest
        if len(names) > MOST_OPEN:
            opened = _open_many(files, open_one)
        else:
            betons = in_threads(open_one, range(len(names)))
            for one in betons:
                check(one)
            opened = BetonFiles(files, betons, check.facts([]))
        keep(opened)
    return opened


def _open_many(files: Files, open_one: Callable[[int], Beton]) -> BetonFiles:
    names, numbers, used = files.names, range(len(files.names)), _Checks()
    away = [at_address(name) for name in names]

    def look() -> Facts:
        check, checksums = _Checks(), list[int]()
        for first in numbers[::MOST_OPEN]:
            for number, one in enumerate(in_threads(open_one, numbers[first : first + MOST_OPEN]), first):
                check(one)
                shelf.put(number, one)
                if check.has_checksums:
                    checksums.append(one.all_checksums())
        return check.facts(checksums if check.has_checksums else [])

    def again(number: int) -> Beton:
        one = open_one(number)
        try:
            one.file.require_identity(facts.identities[number])
        except BetonError:
            forget(names, away)
            raise
        used.alike(one)
        return one

    shelf = Shelf(again, len(numbers), MOST_OPEN)
    facts = Facts.shared(names, away, look)
    first = away.index(True) if any(away) else 0
    try:
        shelf[first]  # by which the shelf knows whether files are streamed
    except BetonError:  # replaced at the address after another process has looked
        facts = Facts.shared(names, away, look)
        shelf[first]
    return BetonFiles(files, shelf, facts)
