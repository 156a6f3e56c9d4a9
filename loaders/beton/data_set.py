"""One or several `.beton` files, read as one data set: their samples one after the other."""

import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common import machine
from ...common.errors import BetonError
from ...common.exhaustion import more_descriptors
from ...common.storage.cache import Remote
from ..sources import Files, Source, files_of, in_threads
from .open_file import Identity
from .reader import Beton, open_beton
from .tables import Rows

Indices = NDArray[np.int64]

CHECKED = 1 << 18
"""Samples of a data set that are all checked when it is opened, in about 0.3 s; of a larger one, those that are used."""
_KNOWN = 512  # samples of a larger one whose sizes stand for all


class BetonFiles:
    """The samples of several files with the same fields and classes, numbered through in the files' order. What it
    shares with `Beton` is the same in all files, or the arrays of all samples, `(N,)`."""

    def __init__(self, files: Files, betons: list[Beton]) -> None:
        self.files, self.name = tuple(betons), str(files)
        # The index of each file's first sample; the last entry is the number of all samples.
        self.starts = np.cumsum([0, *map(len, betons)], dtype=np.int64)
        self.parts: tuple[tuple[float, int, int], ...] = ()  # weight, first and end of each data set of a mix
        if files.weights is not None:
            ends = np.cumsum([0, *(len(part.files) for part in files.parts)])
            bounds = self.starts[ends].tolist()
            self.parts = tuple(zip(files.weights, bounds[:-1], bounds[1:], strict=True))
        self._check()
        first = self.files[0]
        self.fields, self.targets, self.classes = first.fields, first.targets, first.classes
        self.channels, self.depth, self.label_name = first.channels, first.depth, first.label_name
        self.lazy = any(one.tables is not None for one in self.files)
        """Whether samples are checked when they are used. Then the arrays `(N,)` are of all samples only if needed."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def colors(self, name: str) -> tuple[str, ...]:
        """Return the color of each class index in a mask, `"#rrggbb"`: that of the first file which has one, or ""."""
        own = (one.colors.get(name, ()) for one in self.files)
        return tuple(next(filter(None, each), "") for each in itertools.zip_longest(*own))

    @cached_property
    def modes(self) -> NDArray[np.uint8]:
        return self._joined(lambda one: one.modes)

    @cached_property
    def widths(self) -> NDArray[np.uint16]:
        return self._joined(lambda one: one.widths)

    @cached_property
    def heights(self) -> NDArray[np.uint16]:
        return self._joined(lambda one: one.heights)

    @cached_property
    def pointers(self) -> NDArray[np.uint64]:
        return self._joined(lambda one: one.pointers)

    @cached_property
    def sizes(self) -> NDArray[np.uint64]:
        return self._joined(lambda one: one.sizes)

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
        by_file = [(at, one.rows(own)) for one, at, own in self._by_file(indices)]
        if len(by_file) == 1:
            return by_file[0][1]
        back = np.argsort(np.concatenate([at for at, _ in by_file]))
        columns = zip(*(vars(rows).values() for _, rows in by_file), strict=True)
        return Rows(*(np.concatenate(column)[back] for column in columns))

    @cached_property
    def known(self) -> Rows:
        """The rows of all samples; of a data set that is checked when used, those of some, evenly taken."""
        if not self.lazy:
            return self._all
        return self.rows(np.linspace(0, len(self) - 1, _KNOWN).astype(np.int64))

    @cached_property
    def labels(self) -> NDArray[Any]:
        """`(N,)` or `(N, K)`, as `Beton.labels`; raises `BetonError` if they are masks."""
        return self._joined(lambda one: one.labels)

    @cached_property
    def checksums(self) -> NDArray[np.uint32] | None:
        """`(N,)` CRC-32 of each sample when it was converted; None if a file has no manifest."""
        if any(one.checksums is None for one in self.files):
            return None
        return self._joined(lambda one: one.checksums)

    @cached_property
    def pages(self) -> NDArray[np.int64]:
        """`(N,)` the page that each sample is on, numbered through all files."""
        pages, first = [], 0
        for one in self.files:
            pages.append(one.pointers.astype(np.int64) // one.page_size + first)
            first = int(pages[-1].max()) + 1
        return np.concatenate(pages)

    @property
    def samples_on_a_page(self) -> int:
        """About so many samples that follow each other are on one page of a file."""
        return max(self.files[0].page_size * len(self) // sum(len(one.file) for one in self.files), 1)

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

    def prefetch(self, indices: Indices) -> None:
        if self.remote or self.exceeds_memory:
            for one, _, own in self._by_file(indices):
                one.prefetch(own, local=self.exceeds_memory)

    def prepare(self, indices: Indices) -> None:
        if self.remote:
            for one, _, own in self._by_file(indices):
                one.prepare(own)

    def are_unchanged(self, indices: Indices, images: NDArray[np.uint32]) -> bool:
        return all(one.are_unchanged(own, images[at]) for one, at, own in self._by_file(indices))

    @cached_property
    def remote(self) -> bool:
        return any(one.file.mirror is not None for one in self.files)

    @cached_property
    def exceeds_memory(self) -> bool:
        """Whether the files are larger than the free memory, so that the system cannot keep what it has read."""
        return sum(len(one.file) for one in self.files) > machine.free_memory()

    def require_sizes(self) -> None:
        for one in self.files:
            one.file.require_size()

    def require_identities(self, identities: list[Identity]) -> None:
        for one, identity in zip(self.files, identities, strict=True):
            one.file.require_identity(identity)

    def close(self) -> None:
        """End what `prefetch` has begun. The files stay open."""
        for one in self.files:
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

    def _joined(self, values: Callable[[Beton], Any]) -> NDArray[Any]:
        arrays = [np.asarray(values(one)) for one in self.files]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)  # a single one is not copied

    def _check(self) -> None:
        first = self.files[0]
        for one in self.files[1:]:
            for what, own, there in (
                ("fields", _types(one), _types(first)),
                ("targets", one.targets, first.targets),
                ("classes", one.classes, first.classes),
            ):
                if own != there:
                    raise BetonError(
                        f"{one.path} has the {what} {_brief(own)}, and {first.path} has {_brief(there)}. Files of one "
                        f"data set, and of a mix, must have the same {what} in the same order. Convert them alike "
                        "(classes=, fields=)."
                    )
        for before, one in itertools.pairwise(self.files):
            if not _follows(one.manifest.get("shard"), before.manifest):
                wrong = f"{one.path} does not follow {before.path}: they are from different conversions."
                raise BetonError(f"{wrong} Convert the data again.")


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
    """Open a data source: a `.beton` file, a pattern such as `train-{000..127}.beton`, or several with weights. Each
    takes a descriptor: where needed, the process's soft limit is raised until they are closed."""
    files = files_of(source)
    most = CHECKED // len(files.names)
    with more_descriptors(len(files.names)) as keep:
        opened = BetonFiles(files, in_threads(lambda name: open_beton(name, remote, most), files.names))
        keep(opened)
    return opened
