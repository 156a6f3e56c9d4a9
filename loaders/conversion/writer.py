"""Write `.beton` files and their manifests: all appear complete, or none."""

from __future__ import annotations

import itertools
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...common.errors import DataError
from ...common.storage.files import atomic_files
from ..beton.layout import HEADER, MAX_PAGE, MODE_JPEG, VERSION, Field, metadata_dtype, tables_start
from ..beton.manifest import SEAL_BYTES, manifest_path, seal, write_manifest
from .columns import Columns, Sample

PAGE_SIZE = 1 << 23
"""8 MiB, FFCV's own default; doubled until the largest sample fits on a page."""


@dataclass(frozen=True)
class Skipped:
    """A skipped sample: its name, and the reason."""

    name: str
    reason: str


@dataclass
class Written:
    """What was written: the number of samples, the kind of each field, image counts by treatment and mode, skipped
    samples, and the size in bytes of all files."""

    samples: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    treatments: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    skipped: list[Skipped] = field(default_factory=list)
    size: int = 0


class Pages:
    """Assign samples to pages: each entirely on one page, in order.

    The page size can grow afterwards: what lies within a page of 8 MiB also lies within one of 16 MiB, so a larger
    sample only has to begin at the next multiple of the larger page size.
    """

    def __init__(self, tables: int) -> None:
        self.size, self.end = PAGE_SIZE, -(-tables // PAGE_SIZE) * PAGE_SIZE

    def place(self, size: int) -> int:
        """Return the position for a sample of `size` bytes.

        Raises:
            DataError: if it is larger than the format's largest page.
        """
        if size > MAX_PAGE:
            raise DataError(f"A sample of {size:,} bytes is larger than the format's largest page, 2 GiB.")
        while size > self.size:
            self.size *= 2
        page_end = (self.end // self.size + 1) * self.size
        start = self.end if self.end + size <= page_end else page_end
        self.end = start + size
        return start


def write_betons(
    outs: Sequence[Path],
    samples: Iterable[Sample | Skipped],
    most: int,
    fields: Sequence[Field],
    about: dict[str, Any],
) -> Written:
    """Write the files and their manifests. All of them appear when the last one is complete.

    The manifest of each of several files names the seal of the one before, so that files of different conversions are
    never read as one data set.

    Args:
        outs: the files, each for an equal share of the samples.
        samples: in file order, at most `most` of them.
        most: their number, including those that are skipped.
        fields: of every sample, the image first and the label second.
        about: further content of the manifests, including `"classes"` (their names, or none).

    Raises:
        DataError: if no sample is left for a file, or a label has no class name.
        DrivetrainError: if a file cannot be written.
    """
    written, follows, rest = Written(), "", iter(samples)
    with atomic_files(*(path for out in outs for path in (manifest_path(out), out))) as opened:
        for number, (manifest_file, file) in enumerate(zip(opened[::2], opened[1::2], strict=True)):
            share = most * (number + 1) // len(outs) - most * number // len(outs)
            columns, part = Columns(fields), Written()
            pages = Pages(tables_start(len(fields)) + share * metadata_dtype(fields).itemsize + SEAL_BYTES)
            _write_samples(file, itertools.islice(rest, share), share, pages, columns, part)
            _check_classes(columns, len(about["classes"]))
            tables, digest = _write_tables(file, columns, pages)
            shard = {"number": number, "of": len(outs), "follows": follows}
            manifest = {
                "format": "beton 2",
                "samples": len(columns),
                "fields": {field.name: field.kind for field in columns.fields},
                "page_size": pages.size,
                "stored": dict(part.treatments.most_common()),
                **about,
                **({"shard": shard} if len(outs) > 1 else {}),
                "tables_crc32": tables,
                "seal": (follows := digest.hex()),
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
    file: BinaryIO,
    samples: Iterable[Sample | Skipped],
    most: int,
    pages: Pages,
    columns: Columns,
    written: Written,
) -> None:
    """Write the data of the samples as they come."""
    for sample in samples:
        if isinstance(sample, Skipped):
            written.skipped.append(sample)
            continue
        for position, data in columns.add(sample, pages.place(sample.size)):
            file.seek(position)
            file.write(data)
        written.treatments[sample.encoded.treatment] += 1
        written.modes["jpg" if sample.encoded.mode == MODE_JPEG else "raw"] += 1
    if not len(columns):
        first = written.skipped[0]
        raise DataError(f"None of the {most} samples could be used. The first, {first.name}: {first.reason}.")


def _check_classes(columns: Columns, classes: int) -> None:
    """Reject class indices without a class."""
    labels = columns.labels
    if labels is None or columns.fields[1].kind == "float":
        return
    for at, remedy in (
        (int(labels.argmin()), "classes start at 0"),
        (int(labels.argmax()), f"there are {classes} classes"),
    ):
        if labels[at] < 0 or (classes and labels[at] >= classes):
            raise DataError(f"Sample {at} has the class index {labels[at]}, but {remedy}.")


def _write_tables(file: BinaryIO, columns: Columns, pages: Pages) -> tuple[int, bytes]:
    """Write allocation table, fields, metadata, seal and, last, the header; return the tables' CRC-32 and the seal."""
    count = len(columns.fields)
    fields = np.stack([field.descriptor() for field in columns.fields])
    header = np.array([(VERSION, count, pages.size, len(columns), pages.end)], dtype=HEADER)
    table, metadata = columns.allocations(), columns.metadata()
    crc = 0
    for part in (header, fields, metadata, table):
        crc = zlib.crc32(part.view(np.uint8).data, crc)
    digest = seal(crc, columns.checksums)
    start = tables_start(count)
    for position, part in (
        (pages.end, table),
        (HEADER.itemsize, fields),
        (start, metadata),
        (start + metadata.nbytes, np.frombuffer(digest, dtype=np.uint8)),
        (0, header),
    ):
        file.seek(position)
        file.write(part.view(np.uint8).data)
    return crc, digest
