"""Reads a `.beton` file's tables and validates every number that reading samples relies on.

FFCV checks only the version number; a damaged file then hangs, crashes or returns wrong pixels. All checks are
vectorized: a million samples take a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import BetonError
from .image_modes import CHANNELS
from .layout import (
    ALLOCATION,
    FIELD,
    HEADER,
    IMAGE_FIELD,
    MAX_PAGE,
    METADATA_TYPES,
    MIN_PAGE,
    MODE_RAW,
    VERSION,
    Field,
    metadata_dtype,
    tables_start,
)
from .open_file import OpenFile


@dataclass(frozen=True)
class Column:
    """One field of all samples.

    Attributes:
        field: the field's description.
        values: `(N,)`, its metadata: the numbers themselves, or where the data is.
        pointers, sizes: `(N,)` uint64, position and length of each value's data; empty for numbers.
    """

    field: Field
    values: NDArray[Any]
    pointers: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


def read_header(path: Path) -> Any:
    """Return the header, `()` of `HEADER`.

    Raises:
        BetonError: if the file is not a finished `.beton` file.
    """
    if not path.exists():
        where = "" if path.is_absolute() else f" in the working directory, {Path.cwd()}"
        raise BetonError(f"{path} does not exist{where}. Create it with: drivetrain convert SOURCE {path}")
    if not path.is_file():
        raise BetonError(f"{path} is not a file. Convert a folder with: drivetrain convert {path} OUT.beton")
    size = path.stat().st_size
    if size < HEADER.itemsize:
        raise BetonError(f"{path} has {size} bytes, too few for a .beton header. Convert the data again.")
    header = np.fromfile(path, dtype=HEADER, count=1)[0]
    if header["version"] != VERSION:
        raise BetonError(
            f"{path} is not a .beton file of version {VERSION}: it begins with {header.tobytes()[:4]!r}. Pass one, or "
            "create one from your data: drivetrain convert SOURCE OUT.beton"
        )
    if header["alloc_table_ptr"] == 0:
        raise BetonError(f"{path} is unfinished: its conversion was interrupted. Convert the data again.")
    page = int(header["page_size"])
    if page < MIN_PAGE or page > MAX_PAGE or page & (page - 1):
        raise BetonError(f"{path}: page size {page} at byte 4 is not a power of two from 2 MiB to 2 GiB.")
    if header["num_samples"] == 0:
        raise BetonError(f"{path} contains no samples.")
    return header


def read_fields(path: Path, header: Any) -> tuple[list[Field], Field, Field]:
    """Return the fields, in file order; and which of them are the image and the label.

    Raises:
        BetonError: for an invalid descriptor, or fields that Drivetrain does not support.
    """
    count = int(header["num_fields"])
    descriptors = np.fromfile(path, dtype=FIELD, count=count, offset=HEADER.itemsize)
    if len(descriptors) < count:
        raise BetonError(
            f"{path} is truncated: it ends within its {count} field descriptors. Convert the data again."
        )
    try:
        fields = [Field.from_descriptor(row) for row in descriptors]
    except ValueError as error:
        raise BetonError(
            f"{path}: one of its {count} field descriptors is invalid: {error}. Convert the data again."
        ) from None
    names = {field.name for field in fields}
    image, label = image_field(fields), label_field(fields)
    if image is None or label is None or len(names) < count:
        raise BetonError(
            f"{path} has the {count} fields {', '.join(f'{f.name} ({f})' for f in fields)}. Drivetrain "
            "requires one image (rgb_image; or an ndarray named 'image' of uint8 or uint16, (H, W) or (H, W, C) with C "
            "= 1, 3 or 4), a label (int, float, ndarray, or bytes for a mask), and distinct names for all fields."
        )
    return fields, image, label


def image_field(fields: list[Field]) -> Field | None:
    """Return the image: the only `rgb_image`, else the ndarray named `image` whose shape and type are an image's.

    None if there is none, or several.
    """
    pictures = [field for field in fields if field.kind == "rgb_image"]
    arrays = [field for field in fields if field.name == "image" and _is_picture(field)]
    return (pictures or arrays)[0] if len(pictures or arrays) == 1 else None


def _is_picture(field: Field) -> bool:
    if field.kind != "ndarray" or field.dtype.str not in ("|u1", "<u2") or len(field.shape) not in (2, 3):
        return False
    return max(field.shape[:2]) <= 0xFFFF and field.shape[2:] in ((), *((channels,) for channels in CHANNELS))


def label_field(fields: list[Field]) -> Field | None:
    """Return the label: the field named `label`, else the first number or array, else the first bytes (a mask).

    None if there is none. JSON and images are not labels.
    """
    image = image_field(fields)
    numeric = [field for field in fields if field.kind in ("int", "float", "ndarray") and field is not image]
    masks = [field for field in fields if field.kind == "bytes"]
    named = [field for field in numeric + masks if field.name == "label"]
    return next(iter(named or numeric or masks), None)


def read_metadata(path: Path, data: OpenFile | NDArray[np.uint8], header: Any, fields: list[Field]) -> Any:
    """Return the metadata, `(N,)` of `metadata_dtype(fields)`."""
    start = tables_start(len(fields))
    dtype = metadata_dtype(fields)
    end = start + int(header["num_samples"]) * dtype.itemsize
    if end > len(data):
        raise BetonError(
            f"{path} is truncated: {header['num_samples']} samples need {end} bytes of metadata, "
            f"the file has {len(data)}."
        )
    return data[start:end].view(dtype)


def read_allocations(
    path: Path, data: OpenFile | NDArray[np.uint8], header: Any, first: int, samples: int
) -> Any:
    """Return the allocation table sorted by position; data may be anywhere from byte `first` to the table.

    Raises:
        BetonError: if an allocation is outside the data, crosses a page, or overlaps another.
    """
    start = int(header["alloc_table_ptr"])
    if start > len(data) or (len(data) - start) % ALLOCATION.itemsize:
        raise BetonError(
            f"{path} is truncated: its allocation table should start at byte {start} and fill the file in "
            f"rows of {ALLOCATION.itemsize}, but the file has {len(data)} bytes."
        )
    table = np.frombuffer(data[start:].tobytes(), dtype=ALLOCATION)
    page, limit, one = np.uint64(header["page_size"]), np.uint64(start), np.uint64(1)
    ends = table["ptr"] + table["size"]
    bad = (table["sample_id"] >= samples) | (ends > limit) | (ends < table["ptr"])
    bad |= table["ptr"] < np.uint64(first)
    bad |= table["ptr"] // page != (np.maximum(ends, table["ptr"] + one) - one) // page
    if bad.any():
        row = int(np.argmax(bad))
        raise BetonError(
            f"{path}: row {row} of the allocation table ({table[row]}) points outside the data or crosses a "
            f"page of {page} bytes."
        )
    if (
        len(table) > 1 and (table["ptr"][1:] < ends[:-1]).any()
    ):  # written by several FFCV processes, or corrupt
        table = table[np.lexsort((table["size"], table["ptr"]))]
        if (table["ptr"][:-1] + table["size"][:-1] > table["ptr"][1:]).any():
            raise BetonError(f"{path}: allocations overlap.")
    return table


def match_allocations(path: Path, fields: list[Field], rows: Any, table: Any) -> list[Column]:
    """Return the columns, each value matched to the one allocation of its sample that it points to.

    Raises:
        BetonError: if a value points elsewhere, or has an impossible length.
    """
    empty, table = table[table["size"] == 0], table[table["size"] > 0]
    used, nothing = np.zeros(len(table), dtype=bool), np.zeros(0, dtype=np.uint64)
    empties = np.zeros(len(rows), dtype=np.int64)
    columns = []
    for number, field in enumerate(fields):
        values = rows[f"f{number}"]
        if not field.allocated:
            columns.append(Column(field, values.copy(), nothing, nothing))
            continue
        pointers = (values if field.kind == "ndarray" else values[values.dtype.names[-1]]).copy()
        if METADATA_TYPES[field.type_id].names == ("ptr", "size"):
            pointers, filled = values["ptr"].copy(), values["size"] > 0
            empties += ~filled
            if not np.isin(pointers[~filled], empty["ptr"]).all():
                raise BetonError(
                    f"{path}: an empty value of {field.name!r} points to data that was never written."
                )
        else:
            filled = np.ones(len(rows), dtype=bool)
        sizes = np.zeros(len(rows), dtype=np.uint64)
        sizes[filled] = _claim(path, pointers, filled, table, used)
        _check_sizes(path, field, values, sizes)
        columns.append(Column(field, values.copy(), pointers, sizes))
    if not np.array_equal(np.bincount(empty["sample_id"].astype(np.int64), minlength=len(rows)), empties):
        raise BetonError(f"{path}: the allocation table and the metadata disagree on the empty values.")
    return columns


def _claim(path: Path, pointers: Any, filled: Any, table: Any, used: NDArray[np.bool_]) -> Any:
    """Return the length of the data that each of the `filled` samples points to, claiming each allocation once."""
    wanted, samples = pointers[filled], np.flatnonzero(filled)
    at = np.minimum(np.searchsorted(table["ptr"], wanted), max(len(table) - 1, 0))
    missing = table["ptr"][at] != wanted if len(table) else np.ones(len(wanted), bool)
    if not missing.any():
        missing = (table["sample_id"][at] != samples) | used[at]
    if missing.any():
        sample = samples[int(np.argmax(missing))]
        raise BetonError(f"{path}: sample {sample} points to data that was never written.")
    used[at] = True
    return table["size"][at]


def _check_sizes(path: Path, field: Field, values: Any, sizes: NDArray[np.uint64]) -> None:
    if field.type_id == IMAGE_FIELD:
        pixels = values["width"].astype(np.uint64) * values["height"].astype(np.uint64) * np.uint64(3)
        wrong = (
            (pixels == 0) | (values["mode"] > MODE_RAW) | ((values["mode"] == MODE_RAW) & (sizes != pixels))
        )
    else:
        wrong = sizes != (np.uint64(field.nbytes) if field.kind == "ndarray" else values["size"])
    if wrong.any():
        sample = int(np.argmax(wrong))
        content = (
            f"mode {values['mode'][sample]}, {values['width'][sample]} × {values['height'][sample]} pixels"
            if field.type_id == IMAGE_FIELD
            else f"{field.name!r} is {field} of {field.nbytes if field.kind == 'ndarray' else values['size'][sample]}"
        )
        raise BetonError(
            f"{path}: sample {sample} has {content} in {sizes[sample]} bytes, which is impossible."
        )


def check_numbers(path: Path, column: Column, classes: int) -> None:
    """Reject impossible labels, such as ints read as floats because one bit of a type flipped."""
    labels = column.values
    if column.field.kind == "int":
        bad = (labels < -(1 << 31)) | (labels >= (1 << 31))
        if classes:
            bad |= (labels < 0) | (labels >= classes)
        allowed = f"a class index from 0 to {classes - 1}" if classes else "a 32-bit class index"
    else:
        tiny, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max
        bad = (labels != 0) & ~((np.abs(labels) >= tiny) & (np.abs(labels) <= largest))
        allowed = "a number that fits float32"
    if bad.any():
        sample = int(np.argmax(bad))
        raise BetonError(
            f"{path}: sample {sample} has the label {labels[sample]}, which is not {allowed}. Convert the data again."
        )
