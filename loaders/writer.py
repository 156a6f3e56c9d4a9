"""Writes a `.beton` file and its manifest: both appear whole, or neither does."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import DataError
from ..files import atomic_file
from .beton import (
    ALLOCATION,
    FIELD,
    FLOAT_FIELD,
    HEADER,
    IMAGE_FIELD,
    INT_FIELD,
    MAX_PAGE,
    METADATA_TYPES,
    VERSION,
    manifest_path,
    metadata_dtype,
    tables_start,
)
from .encode import Encoded

PAGE_SIZE = 1 << 23
"""8 MiB, FFCV's own default; doubled until the largest sample fits on a page."""


@dataclass(frozen=True)
class Sample:
    """An image as it will be stored, and its label."""

    encoded: Encoded
    label: int | float


@dataclass(frozen=True)
class Skipped:
    """A sample that is left out: its name, and why."""

    name: str
    reason: str


@dataclass
class Written:
    """What was written: the manifest, how many images in which way, and what was left out."""

    manifest: dict[str, Any] = field(default_factory=dict)
    how: Counter[str] = field(default_factory=Counter)
    skipped: list[Skipped] = field(default_factory=list)
    page_size: int = 0


class PageTooSmall(Exception):
    """A sample needs a page of at least `size` bytes; the file must be begun again."""

    def __init__(self, size: int) -> None:
        self.size = size


@dataclass
class _Columns:
    """The metadata of the samples written so far, in their order."""

    images: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """mode, width, height, pointer, size"""
    labels: list[int | float] = field(default_factory=list)
    payloads: list[int] = field(default_factory=list)
    """CRC-32 of each image's bytes"""

    def checksums(self, label_kind: int) -> list[int]:
        """Of each sample as `beton.checksum` defines it."""
        labels = np.array(self.labels, dtype=METADATA_TYPES[label_kind])
        pairs = zip(labels, self.payloads, strict=True)
        return [zlib.crc32(label.tobytes(), payload) for label, payload in pairs]


def write_beton(
    out: Path, samples: Iterable[Sample | Skipped], most: int, page_size: int, about: dict[str, Any]
) -> Written:
    """Writes the file and the manifest beside it.

    Args:
        out: the file.
        samples: in the order of the file, at most `most` of them.
        page_size: in bytes.
        about: what else the manifest says, `"classes"` (their names, or none) among it.

    Raises:
        PageTooSmall: at the first sample that does not fit on a page.
        DataError: if no sample is left, or a label is not one of the classes.
        DrivetrainError: if a file cannot be written.
    """
    written, columns = Written(page_size=page_size), _Columns()
    with atomic_file(out) as file:
        end = _write_images(file, samples, most, written, columns)
        kind = _label_kind(columns.labels, len(about["classes"]))
        written.manifest = {
            "format": "beton 2",
            "samples": len(columns.images),
            "fields": {"image": "rgb_image", "label": "int" if kind == INT_FIELD else "float"},
            "page_size": page_size,
            "stored": dict(written.how.most_common()),
            **about,
            "tables_crc32": _write_tables(file, columns, kind, end, page_size),
            "crc32": columns.checksums(kind),
        }
        # All that can fail comes before the two renames: an older pair is replaced whole or stays.
        file.flush()
        os.fsync(file.fileno())
        with atomic_file(manifest_path(out)) as beside:
            beside.write(json.dumps(written.manifest, indent=1).encode())
    return written


def _write_images(
    file: BinaryIO, samples: Iterable[Sample | Skipped], most: int, written: Written, columns: _Columns
) -> int:
    """Writes the images as they come, and gives the position after the last."""
    tables = tables_start(2) + most * metadata_dtype([IMAGE_FIELD, INT_FIELD]).itemsize
    cursor = -(-tables // written.page_size) * written.page_size
    for sample in samples:
        if isinstance(sample, Skipped):
            written.skipped.append(sample)
            continue
        image = sample.encoded
        cursor = _place(cursor, len(image.payload), written.page_size)
        file.seek(cursor)
        file.write(image.payload)
        columns.images.append((image.mode, image.width, image.height, cursor, len(image.payload)))
        columns.labels.append(sample.label)
        columns.payloads.append(zlib.crc32(image.payload))
        written.how[image.how] += 1
        cursor += len(image.payload)
    if not columns.images:
        first = written.skipped[0]
        raise DataError(f"None of the {most} samples could be used; the first, {first.name}: {first.reason}.")
    return cursor


def _place(cursor: int, size: int, page_size: int) -> int:
    """Where an allocation goes: at the cursor, or at the next page if it would cross into it."""
    if size > page_size:
        if size > MAX_PAGE:
            raise DataError(f"A sample of {size:,} bytes is larger than the format's largest page, 2 GiB.")
        raise PageTooSmall(size)
    page_end = (cursor // page_size + 1) * page_size
    return cursor if cursor + size <= page_end else page_end


def _label_kind(labels: list[int | float], classes: int) -> int:
    """The type of the label field: float if one label is, else int, checked against the classes."""
    if any(isinstance(label, float) for label in labels):
        return FLOAT_FIELD
    for label, remedy in ((min(labels), "classes start at 0"), (max(labels), f"there are {classes} classes")):
        if label < 0 or (classes and label >= classes):
            raise DataError(f"Sample {labels.index(label)} has the class {label}; {remedy}.")
    return INT_FIELD


def _write_tables(file: BinaryIO, columns: _Columns, label_kind: int, end: int, page_size: int) -> int:
    """Writes allocation table, fields, metadata and, last, the header; gives the CRC-32 of them all."""
    count = len(columns.images)
    table = np.zeros(count, dtype=ALLOCATION)
    metadata = np.zeros(count, dtype=metadata_dtype([IMAGE_FIELD, label_kind]))
    modes, widths, heights, pointers, sizes = (
        np.array(column) for column in zip(*columns.images, strict=True)
    )
    table["sample_id"], table["ptr"], table["size"] = np.arange(count), pointers, sizes
    image = metadata["f0"]
    image["mode"], image["width"], image["height"], image["data_ptr"] = modes, widths, heights, pointers
    metadata["f1"] = columns.labels
    fields = np.zeros(2, dtype=FIELD)
    for row, name, kind in zip(fields, (b"image", b"label"), (IMAGE_FIELD, label_kind), strict=True):
        row["type_id"] = kind
        row["name"][: len(name)] = np.frombuffer(name, dtype=np.uint8)
    header = np.array([(VERSION, 2, page_size, count, end)], dtype=HEADER)

    parts = [(end, table), (HEADER.itemsize, fields), (tables_start(2), metadata), (0, header)]
    for position, part in parts:
        file.seek(position)
        file.write(part.tobytes())
    return zlib.crc32(b"".join(part.tobytes() for part in (header, fields, metadata, table)))
