"""Write `.beton` files and their manifests: all appear complete, or none."""

import itertools
import os
import zlib
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...common.errors import DataError
from ...common.storage.files import atomic_files
from ..beton import layout
from ..beton.layout import Field
from ..beton.manifest import Blocks, manifest_path, seal, write_manifest
from .encode import Encoded
from .values import Colors, Stored

PAGE_SIZE = 1 << 23  # 8 MiB, FFCV's own default; doubled until the largest sample fits on a page

_NUMBER: dict[str, Any] = {"int": np.int64, "float": np.float64}


@dataclass(frozen=True)
class Sample:
    """An image as it will be stored, the values of the further fields, label first, and the colors of its masks."""

    encoded: Encoded
    values: tuple[Stored, ...]
    colors: Mapping[str, Colors] = field(default_factory=dict)

    @property
    def blobs(self) -> list[bytes]:
        """The image's bytes and those of the further fields that take some: what is written to a page."""
        return [self.encoded.payload, *(value for value in self.values if isinstance(value, bytes))]

    @property
    def size(self) -> int:
        """Bytes it takes on a page; an empty value takes one, so that positions stay unique."""
        return sum(max(len(data), 1) for data in self.blobs)


@dataclass(frozen=True)
class Skipped:
    name: str
    reason: str


@dataclass
class Written:
    samples: int = 0
    classes: list[str] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    treatments: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    skipped: list[Skipped] = field(default_factory=list)
    colors: dict[str, Colors] = field(default_factory=dict)  # of each mask's classes, the first that one has
    size: int = 0  # of all files, in bytes


class Columns:
    """Metadata, allocations and checksums of the samples so far, in order: about 70 bytes each. Fields are the image,
    the label, which becomes "float" instead of "int" with the first float, and further ones."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = list(fields)
        self._modes, self._widths, self._heights = array("B"), array("H"), array("H")
        self._values: list[Any] = [array("d" if field.kind == "float" else "q") for field in fields[1:]]
        self._pointers, self._sizes = array("Q"), array("Q")  # of all allocations, sample by sample
        self._skips = array("Q")  # of each skipped sample, how many samples are before it
        self._checksums: dict[str, array[int]] = defaultdict(lambda: array("I"))  # by the label's kind

    def __len__(self) -> int:
        return len(self._modes)

    def add(self, sample: Sample, start: int) -> list[tuple[int, bytes]]:
        """Add a sample whose data begins at `start`; return the `(position, bytes)` to write."""
        image, at, writes = sample.encoded, start, []
        self._modes.append(image.mode)
        self._widths.append(image.width)
        self._heights.append(image.height)
        for data in sample.blobs:
            self._pointers.append(at)
            self._sizes.append(len(data))
            writes.append((at, data))
            at += max(len(data), 1)
        if self.fields[1].kind == "int" and isinstance(sample.values[0], float):
            self.fields[1] = Field(self.fields[1].name, "float")
            self._values[0] = array("d", self._values[0])
        for column, value in zip(self._values, sample.values, strict=True):
            if not isinstance(value, bytes):
                column.append(value)
        # Whether labels are ints or floats is known only after the last sample.
        label, crc = self.fields[1].kind, zlib.crc32(image.payload)
        for kind in ("int", "float") if label == "int" else (label,):
            self._checksums[kind].append(self._checksum(crc, sample, kind))
        return writes

    def skip(self) -> None:
        """Note that the source has a sample here that is not stored."""
        self._skips.append(len(self))

    def _checksum(self, crc: int, sample: Sample, label: str) -> int:
        kinds = [label, *(field.kind for field in self.fields[2:])]
        for kind, value in zip(kinds, sample.values, strict=True):
            data = value if isinstance(value, bytes) else _NUMBER[kind](value).tobytes()
            crc = zlib.crc32(data, crc)
        return crc

    @property
    def checksums(self) -> NDArray[np.uint32]:
        """Each sample's checksum, `(N,)`, as defined by `Beton.checksum`."""
        return np.array(self._checksums[self.fields[1].kind], dtype=np.uint32)

    def check_classes(self, classes: int, before: int) -> None:
        """Reject a label that no class has. `before`: samples for earlier files of the conversion, also skipped ones:
        the message has the sample's number in the source."""
        if self.fields[1].kind != "int":
            return
        labels = np.array(self._values[0])
        for at, wrong, reason in (
            (labels.argmin(), labels.min() < 0, f"classes start at 0. Targets are floats, such as {labels.min()}.0"),
            (labels.argmax(), classes and labels.max() >= classes, f"there are {classes} classes"),
        ):
            if wrong:
                number = before + int(at) + bisect_right(self._skips, int(at))
                raise DataError(f"Sample {number} has the class index {labels[at]}, but {reason}.")

    def metadata(self) -> NDArray[Any]:
        """Return the metadata, `(N,)` of `metadata_dtype(fields)`."""
        rows = np.zeros(len(self), dtype=layout.metadata_dtype(self.fields))
        pointers = iter(np.frombuffer(self._pointers, dtype=np.uint64).reshape(len(self), -1).T)
        sizes = iter(np.frombuffer(self._sizes, dtype=np.uint64).reshape(len(self), -1).T)
        for number, own in enumerate(self.fields):
            column = rows[f"f{number}"]
            if not own.allocated:
                column[:] = self._values[number - 1]
                continue
            at, size = next(pointers), next(sizes)
            if own.kind == "rgb_image":
                column["mode"], column["width"] = self._modes, self._widths
                column["height"], column["data_ptr"] = self._heights, at
            elif own.kind == "ndarray":
                column[:] = at
            else:
                column["ptr"], column["size"] = at, size
        return rows

    def allocations(self) -> NDArray[Any]:
        """Return the allocations, `(N · allocated fields,)` of `ALLOCATION`."""
        table = np.zeros(len(self._pointers), dtype=layout.ALLOCATION)
        table["sample_id"] = np.repeat(np.arange(len(self)), len(table) // len(self))
        table["ptr"], table["size"] = self._pointers, self._sizes
        return table


class Pages:
    """Assign samples to pages: each entirely on one page, in order, after the tables of so many bytes. What lies within
    a page of 8 MiB also lies within one of 16 MiB, so the page size can grow afterwards."""

    def __init__(self, tables: int) -> None:
        self.size, self.end = PAGE_SIZE, -(-tables // PAGE_SIZE) * PAGE_SIZE

    def place(self, size: int) -> int:
        if size > layout.MAX_PAGE:
            raise DataError(f"A sample of {size:,} bytes is larger than the format's largest page, 2 GiB.")
        while size > self.size:
            self.size *= 2
        page_end = (self.end // self.size + 1) * self.size
        start = self.end if self.end + size <= page_end else page_end
        self.end = start + size
        return start


def write_betons(
    outs: Sequence[Path], samples: Iterable[Sample | Skipped], most: int, fields: Sequence[Field], about: dict[str, Any]
) -> Written:  # fmt: skip
    """Write the files, each with an equal share of the `most` samples (with skipped ones), and manifests: all appear at
    the end, or none. `fields` begin with image and label; `about` has further content of the manifests."""
    written, follows, rest = Written(), "", iter(samples)
    with atomic_files(*(path for out in outs for path in (manifest_path(out), out))) as opened:
        for number, (manifest_file, file) in enumerate(zip(opened[::2], opened[1::2], strict=True)):
            share = most * (number + 1) // len(outs) - most * number // len(outs)
            columns, part = Columns(fields), Written()
            pages = Pages(layout.tables_end(share, fields) + layout.SEAL_BYTES)
            _write_samples(file, itertools.islice(rest, share), share, pages, columns, part)
            if number and columns.fields != fields:
                raise DataError(
                    f"{outs[number]} has labels with fractions, and those of {outs[number - 1]} are all whole numbers: "
                    "files of one data set have labels of one kind. Make the first label a float, or write one file."
                )
            fields = columns.fields
            written.classes = [] if columns.fields[1].kind == "float" else about["classes"]  # of indices
            columns.check_classes(len(written.classes), written.samples + len(written.skipped))
            tables, digest, blocks = _write_tables(file, columns, pages)
            # With the seal before, so that files of different conversions are never read as one data set.
            shard = {"number": number, "of": len(outs), "follows": follows}
            manifest = {
                "format": "beton 2",
                "samples": len(columns),
                "fields": {field.name: field.kind for field in columns.fields},
                "page_size": pages.size,
                "stored": dict(part.treatments.most_common()),
                "modes": dict(part.modes),
                **about,
                "classes": written.classes,
                **({"colors": colors} if (colors := _listed(part.colors)) else {}),
                **({"shard": shard} if len(outs) > 1 else {}),
                "tables_crc32": tables,
                "seal": (follows := digest.hex()),
                "blocks": blocks.to_json(digest),
            }
            write_manifest(manifest_file, manifest, columns.checksums)
            written.fields = manifest["fields"]
            written.samples += len(columns)
            written.treatments += part.treatments
            written.modes += part.modes
            written.skipped += part.skipped
            written.size += file.seek(0, os.SEEK_END)
    return written


def _write_samples(
    file: BinaryIO, samples: Iterable[Sample | Skipped], most: int, pages: Pages, columns: Columns, written: Written
) -> None:  # fmt: skip
    for sample in samples:
        if isinstance(sample, Skipped):
            written.skipped.append(sample)
            columns.skip()
            continue
        for position, data in columns.add(sample, pages.place(sample.size)):
            file.seek(position)
            file.write(data)
        for name, colors in sample.colors.items():
            written.colors[name] = colors | written.colors.get(name, {})
        written.treatments[sample.encoded.treatment] += 1
        written.modes["jpg" if sample.encoded.mode == layout.MODE_JPEG else "raw"] += 1
    if not len(columns):
        first = written.skipped[0]
        raise DataError(f"None of the {most} samples could be used. The first, {first.name}: {first.reason}.")


def _listed(colors: Mapping[str, Colors]) -> dict[str, list[str]]:
    """Return the color of each class index of each mask that has any, "" where there is none."""
    return {name: [own.get(index, "") for index in range(max(own) + 1)] for name, own in colors.items() if own}


def _write_tables(file: BinaryIO, columns: Columns, pages: Pages) -> tuple[int, bytes, Blocks]:
    """Write allocation table, fields, metadata, seal and, last, the header; return the tables' CRC-32, the seal and the
    digests by block."""
    count = len(columns.fields)
    fields = np.stack([field.descriptor() for field in columns.fields])
    header = np.array([(layout.VERSION, count, pages.size, len(columns), pages.end)], dtype=layout.HEADER)
    table, metadata = columns.allocations(), columns.metadata()
    crc = 0
    for part in (header, fields, metadata, table):
        crc = zlib.crc32(part.view(np.uint8).data, crc)
    digest = seal(crc, columns.checksums)
    start = layout.HEADER.itemsize + fields.nbytes
    for position, part in (
        (pages.end, table),
        (layout.HEADER.itemsize, fields),
        (start, metadata),
        (start + metadata.nbytes, np.frombuffer(digest, dtype=np.uint8)),
        (0, header),
    ):
        file.seek(position)
        file.write(part.view(np.uint8).data)
    return crc, digest, Blocks.of(header.tobytes() + fields.tobytes(), metadata, table, columns.checksums)
