"""The tables of a large file, read and checked sample by sample: opening it costs the same whatever its size, and the
ranks of a machine share what they read in the system's page cache. Read with `pread`, as samples are: a mapped file
that another program truncates would kill the process (`open_file`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ...common.errors import BetonError
from .layout import (
    ALLOCATION,
    MODE_RAW,
    Column,
    Field,
    check_allocations,
    check_numbers,
    check_places,
    check_sizes,
    metadata_dtype,
    tables_start,
)
from .manifest import BLOCK, LINE, Blocks, manifest_path
from .open_file import OpenFile

Indices = NDArray[np.int64]

_AT_ONCE = 128  # blocks of a remote file that are fetched together: about 4 MB
_PLACES = {"rgb_image": "data_ptr", "bytes": "ptr", "json": "ptr"}  # a field's own name of where its data is


class Lazy:
    """An array `(N,)` of which values are read, and checked, when they are indexed; `np.asarray` reads all."""

    def __init__(self, length: int, read: Callable[[Indices], NDArray[Any]]) -> None:
        self._length, self._read = length, read

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._read(np.arange(*index.indices(self._length)))
        if np.ndim(index) == 0:
            return self._read(np.array([range(self._length)[int(index)]]))[0]
        return self._read(np.asarray(index))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


@dataclass(frozen=True)
class Rows:
    """What the native core has to know of n samples, each `(n,)`."""

    descriptors: NDArray[np.int32]
    modes: NDArray[np.int32]
    widths: NDArray[np.uint16]
    heights: NDArray[np.uint16]
    pointers: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    # What keeps the descriptors open; none: they stay open anyway.
    files: tuple[object, ...] = field(default=(), kw_only=True)

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.descriptors, self.modes, self.widths, self.heights, self.pointers, self.sizes

    def __len__(self) -> int:
        return len(self.modes)

    def part(self, samples: slice | Indices) -> Rows:
        return Rows(*(column[samples] for column in self.columns), files=self.files)


class Tables:
    """The tables of a file that has a manifest with digests by block: a sample's first use compares those of its block,
    and each use checks every number that it relies on, as opening a small file does for all."""

    def __init__(
        self, path: Path, file: OpenFile, header: Any, fields: list[Field], label: Field, classes: int,
        blocks: Blocks, lines: int,
    ) -> None:  # fmt: skip
        self._path, self._file, self._header, self._fields = path, file, header, fields
        self._label, self._classes, self._blocks, self._lines = label, classes, blocks, lines
        self._samples, self._first = int(header["num_samples"]), check_places(path, file, header, fields)
        self._dtype = metadata_dtype(fields)
        self._slots = [field.name for field in fields if field.allocated]
        table = len(file) - int(header["alloc_table_ptr"])
        if table != self._samples * len(self._slots) * ALLOCATION.itemsize:
            raise BetonError(
                f"{path}: its allocation table has {table} bytes, which are not {len(self._slots)} rows for each of "
                f"{self._samples} samples. Convert the data again."
            )
        self._seen = np.zeros(len(blocks.metadata), np.bool_)

    def columns(self) -> dict[str, Column]:
        """Return the fields by name, as `layout.read_columns`."""
        return {
            field.name: Column(
                field, self._lazy(self._values, number), *(self._lazy(self._place, number, part) for part in range(2))
            )
            for number, field in enumerate(self._fields)
        }

    def image_columns(self, number: int) -> list[Any]:
        """Return modes, widths and heights of the images, field `number`, each `(N,)`."""
        return [self._lazy(self._of_image, number, name) for name in ("mode", "width", "height")]

    def checksums(self) -> Any:
        """Return the CRC-32 of each sample when it was converted, `(N,)`."""
        return self._lazy(self._checksums)

    def all_checksums(self, before: int) -> int:
        """Return the CRC-32 of `checksums`, after bytes whose CRC-32 is `before`."""
        return self._blocks.all_checksums(self._samples, before)

    def images(self, number: int, indices: Indices) -> Rows:
        """Return the rows of the samples `indices` `(n,)`, whose images are field `number`."""
        rows = self._rows(indices)
        pointers, sizes = self._located(number, rows, indices)
        shape = [self._image(number, rows, name) for name in ("mode", "width", "height")]
        descriptors = np.full(len(indices), self._file.descriptor, np.int32)
        return Rows(descriptors, shape[0].astype(np.int32), shape[1], shape[2], pointers, sizes, files=(self._file,))

    def _lazy(self, read: Callable[..., NDArray[Any]], *first: Any) -> Any:
        return Lazy(self._samples, partial(read, *first))

    def _values(self, number: int, indices: Indices) -> NDArray[Any]:
        rows, field = self._rows(indices), self._fields[number]
        values: NDArray[Any] = np.ascontiguousarray(rows[f"f{number}"])
        if field == self._label and not field.allocated:
            check_numbers(self._path, field.kind, values, self._classes, indices)
        if field.allocated:
            self._located(number, rows, indices)
        return values

    def _place(self, number: int, part: int, indices: Indices) -> NDArray[np.uint64]:
        return self._located(number, self._rows(indices), indices)[part]

    def _of_image(self, number: int, name: str, indices: Indices) -> NDArray[Any]:
        rows = self._rows(indices)
        self._located(number, rows, indices)
        return self._image(number, rows, name)

    def _image(self, number: int, rows: Any, name: str) -> NDArray[Any]:
        field = self._fields[number]
        if field.kind == "rgb_image":
            return np.ascontiguousarray(rows[f"f{number}"][name])
        value = {"mode": MODE_RAW, "height": field.shape[0], "width": field.shape[1]}[name]
        return np.full(len(rows), value, np.uint8 if name == "mode" else np.uint16)

    def _rows(self, indices: Indices) -> Any:
        """Return the samples' metadata, whose blocks are as they were converted."""
        blocks = indices // BLOCK
        if not self._seen[blocks].all():
            unseen = np.unique(blocks[~self._seen[blocks]])
            for first in range(0, len(unseen), _AT_ONCE):
                self._check_blocks(unseen[first : first + _AT_ONCE])
        return self._read(tables_start(len(self._fields)), self._dtype, indices)

    def _check_blocks(self, blocks: Indices) -> None:
        counts = np.minimum(BLOCK, self._samples - blocks * BLOCK)
        widths = np.array([self._dtype.itemsize, len(self._slots) * ALLOCATION.itemsize])
        first = np.array([tables_start(len(self._fields)), int(self._header["alloc_table_ptr"])])
        starts, sizes = first + np.outer(blocks * BLOCK, widths), np.outer(counts, widths)
        digests = self._blocks.metadata, self._blocks.allocations
        with self._file.pinned(starts.ravel(), sizes.ravel()):  # of a remote file, fetched together
            for block, places, lengths in zip(blocks.tolist(), starts.tolist(), sizes.tolist(), strict=True):
                for start, size, crcs in zip(places, lengths, digests, strict=True):
                    if not self._is_sound(start, size, crcs[block]):
                        raise self._damaged(block)
                self._seen[block] = True

    def _is_sound(self, start: int, size: int, crc: int) -> bool:
        """Return whether a range has this CRC-32. One of a remote file is fetched a second time."""
        sound = bool(crc32(self._file.read(start, size)) == crc)
        if not sound and self._file.mirror is not None:
            self._file.mirror.forget(start, size)
            sound = bool(crc32(self._file.read(start, size)) == crc)
        return sound

    def _damaged(self, block: int) -> BetonError:
        return BetonError(
            f"{self._path}: what its tables contain of samples {block * BLOCK} to "
            f"{min((block + 1) * BLOCK, self._samples) - 1} has another CRC-32 than in its manifest: one of them is "
            "damaged. Convert the data again."
        )

    def _read(self, start: int, dtype: np.dtype[Any], rows: Indices) -> Any:
        """Return rows of a table that begins at byte `start`."""
        width = dtype.itemsize
        if len(rows) > 1 and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            stored = self._file.read(start + int(rows[0]) * width, len(rows) * width)
            return np.frombuffer(stored, dtype)
        return self._file.read_many(start + rows * width, width).view(dtype)[:, 0]

    def _located(self, number: int, rows: Any, indices: Indices) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return where the data of a field is, and its length, each `(n,)`."""
        field, values = self._fields[number], rows[f"f{number}"]
        if not field.allocated:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        pointers = values if field.kind == "ndarray" else values[_PLACES[field.kind]]
        places = indices * len(self._slots) + self._slots.index(field.name)
        table = self._read(int(self._header["alloc_table_ptr"]), ALLOCATION, places)
        wrong = (table["sample_id"] != indices) | (table["ptr"] != pointers)
        if wrong.any():
            sample = indices[int(np.argmax(wrong))]
            raise BetonError(f"{self._path}: sample {sample} points to data that was never written.")
        check_allocations(self._path, self._header, table, self._first, self._samples, places)
        sizes = np.ascontiguousarray(table["size"])
        check_sizes(self._path, field, values, sizes, indices)
        return np.ascontiguousarray(pointers), sizes

    def _checksums(self, indices: Indices) -> NDArray[np.uint32]:
        found = np.empty(len(indices), np.uint32)
        blocks = indices // BLOCK
        for block in np.unique(blocks).tolist():
            here = blocks == block
            found[here] = self._block_checksums(block)[indices[here] % BLOCK]
        return found

    def _block_checksums(self, block: int) -> NDArray[np.uint32]:
        try:
            return self._stored_checksums(block)
        except BetonError:
            if self._file.mirror is None:
                raise
        self._file.mirror.renew_manifest(self._path)
        vars(self).pop("_manifest", None)
        return self._stored_checksums(block)

    def _stored_checksums(self, block: int) -> NDArray[np.uint32]:
        count = min(BLOCK, self._samples - block * BLOCK)
        text = self._manifest.read(self._lines + block * BLOCK * LINE, count * LINE - 2)
        try:
            values = np.array([int(value) for value in text.split(b",")], np.uint32)
        except (ValueError, OverflowError):
            raise self._damaged(block) from None
        if len(values) != count or crc32(values.astype("<u4").tobytes()) != self._blocks.checksums[block]:
            raise self._damaged(block)
        return values

    @cached_property
    def _manifest(self) -> OpenFile:
        return OpenFile(manifest_path(self._path))
