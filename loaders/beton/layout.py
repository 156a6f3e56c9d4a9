"""The `.beton` format (FFCV's, version 2): its tables, the kinds of fields, and reading them from a file.

Layout, little-endian: header · field descriptors · metadata · padding up to a page · pages · allocation
table to the end of the file. The padding is zeros; Drivetrain stores its seal in its first bytes (`manifest`).
Source: libffcv/ffcv, `ffcv/types.py`, `ffcv/fields` and `ffcv/writer.py` (1.0.2).

FFCV checks only the version number; a damaged file then hangs, crashes or returns wrong pixels. Here every number that
reading samples relies on is checked, vectorized: a million samples take a fraction of a second. Of large files,
`tables` checks those of the samples that are read.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import BetonError
from ...common.storage.stream import mirror_at
from .image_modes import CHANNELS
from .open_file import OpenFile

VERSION = 2
HEADER = np.dtype([("version", "<u2"), ("num_fields", "<u2"), ("page_size", "<u4"), ("num_samples", "<u8"),
                   ("alloc_table_ptr", "<u8")])  # fmt: skip
FIELD = np.dtype([("type_id", "u1"), ("name", "u1", (16,)), ("arguments", "u1", (1024,))])
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
BLOB = np.dtype([("ptr", "<u8"), ("size", "<u8")])
_ARRAY_ARGUMENTS = np.dtype([("shape", "<u8", (32,)), ("type_length", "<u8")])
MODE_JPEG, MODE_RAW = 0, 1
MIN_PAGE, MAX_PAGE = 1 << 21, 1 << 31
SEAL_BYTES = 32  # a SHA-256; see `manifest`

KINDS = ("float", "int", "rgb_image", "bytes", "ndarray", "json")
"""The kinds of fields. A kind's index is its type number in the file."""

_METADATA = {"float": np.dtype("<f8"), "int": np.dtype("<i8"), "rgb_image": IMAGE, "bytes": BLOB,
             "ndarray": np.dtype("<u8"), "json": BLOB}  # fmt: skip


@dataclass(frozen=True)
class Field:
    name: str  # ASCII, at most 16 characters
    kind: str
    dtype: np.dtype[Any] = np.dtype("u1")  # noqa: RUF009 — dtypes are immutable; only ndarrays use it and the shape
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    @property
    def allocated(self) -> bool:
        """Whether the metadata points to data on a page, rather than holding the value."""
        return self.kind not in ("int", "float")

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype} {self.shape}" if self.kind == "ndarray" else self.kind

    def descriptor(self) -> NDArray[Any]:
        """Return the field's row, `()` of `FIELD`, in the file."""
        row = np.zeros((), dtype=FIELD)
        row["type_id"] = KINDS.index(self.kind)
        name = self.name.encode("ascii")
        row["name"][: len(name)] = np.frombuffer(name, dtype=np.uint8)
        if self.kind == "ndarray":
            text = json.dumps(self.dtype.descr).encode("ascii")
            arguments = np.zeros((), dtype=_ARRAY_ARGUMENTS)
            arguments["shape"][: len(self.shape)] = self.shape
            arguments["type_length"] = len(text)
            packed = np.frombuffer(arguments.tobytes() + text, dtype=np.uint8)
            row["arguments"][: len(packed)] = packed
        return row

    @classmethod
    def from_descriptor(cls, row: Any) -> Field:
        """Return the field of a `descriptor` row; raise ValueError naming what is invalid in it."""
        name, *rest = bytes(row["name"]).split(b"\0")
        if not name or any(rest) or not name.isascii() or not name.decode("ascii").isprintable():
            raise ValueError(f"the name {bytes(row['name'])!r} is not ASCII, padded with zeros")
        if row["type_id"] >= len(KINDS):
            raise ValueError(f"the field {name.decode()!r} has the unknown type {row['type_id']}")
        field = cls(name.decode("ascii"), KINDS[row["type_id"]])
        if field.kind == "ndarray":
            return cls(field.name, field.kind, *_array_arguments(row["arguments"]))
        if row["arguments"].any():
            raise ValueError(f"the {field.kind} field {field.name!r} has arguments, which this kind does not take")
        return field


def _array_arguments(stored: NDArray[np.uint8]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    start = _ARRAY_ARGUMENTS.itemsize
    head = stored[:start].view(_ARRAY_ARGUMENTS)[0]
    length, sizes = int(head["type_length"]), [int(size) for size in head["shape"]]
    shape = tuple(size for size in sizes if size)
    if not shape or any(sizes[len(shape) :]) or prod(shape) > MAX_PAGE:
        raise ValueError(f"an ndarray field has the invalid shape {sizes}")
    if length > len(stored) - start or stored[start + length :].any():
        raise ValueError(f"an ndarray field has an invalid dtype of {length} characters")
    try:
        ((empty, description),) = json.loads(stored[start : start + length].tobytes().decode("ascii"))
        dtype = np.dtype(description)
    except Exception as error:  # of several types: of some texts, NumPy raises a SyntaxError
        raise ValueError(f"an ndarray field has an invalid dtype ({error})") from None
    if empty != "" or dtype.kind not in "biufc" or dtype.str != description:
        raise ValueError(f"an ndarray field has the dtype {description!r}, which is not a plain number")
    return dtype, shape


def metadata_dtype(fields: Sequence[Field]) -> np.dtype[Any]:
    """Return the dtype of a metadata row: a column `f0`, `f1`, … per field, aligned as in C."""
    columns: Any = [("", _METADATA[field.kind]) for field in fields]
    dtype: np.dtype[Any] = np.dtype(columns, align=True)
    return dtype


def tables_start(fields: int) -> int:
    """Return where the metadata begins: after the header and `fields` field descriptors."""
    return HEADER.itemsize + fields * FIELD.itemsize


def tables_end(samples: int, fields: Sequence[Field]) -> int:
    """Return where the metadata ends, and the seal begins."""
    return tables_start(len(fields)) + samples * metadata_dtype(fields).itemsize


@dataclass(frozen=True)
class Column:
    field: Field
    values: NDArray[Any]  # `(N,)`, its metadata: the numbers themselves, or where the data is
    pointers: NDArray[np.uint64]  # `(N,)`, the position of each value's data; empty for numbers
    sizes: NDArray[np.uint64]  # `(N,)`, its length in bytes; empty for numbers


def read_header(path: Path) -> Any:
    """Return the header, `()` of `HEADER`; raise BetonError unless it is that of a finished `.beton` file."""
    if not path.exists():
        where = "" if path.is_absolute() else f" in the working directory, {Path.cwd()}"
        command = f"drivetrain convert SOURCE {shlex.quote(str(path))}"
        raise BetonError(f"{path} does not exist{where}. Create it with: {command}")
    if not path.is_file():
        command = f"drivetrain convert {shlex.quote(str(path))} OUT.beton"
        raise BetonError(f"{path} is not a file. Convert a folder with: {command}")
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


def _read_fields(path: Path, header: Any) -> tuple[list[Field], Field, Field]:
    """Return the fields, in file order; and which of them are the image and the label."""
    count = int(header["num_fields"])
    descriptors = np.fromfile(path, dtype=FIELD, count=count, offset=HEADER.itemsize)
    if len(descriptors) < count:
        raise BetonError(f"{path} is truncated: it ends within its {count} field descriptors. Convert the data again.")
    try:
        fields = [Field.from_descriptor(row) for row in descriptors]
    except ValueError as error:
        wrong = f"one of its {count} field descriptors is invalid: {error}"
        raise BetonError(f"{path}: {wrong}. Convert the data again.") from None
    image, label = image_field(fields), label_field(fields)
    if image is None or label is None or len({field.name for field in fields}) < count:
        raise BetonError(
            f"{path} has the {count} fields {', '.join(f'{f.name} ({f})' for f in fields)}. Drivetrain "
            "requires one image (rgb_image; or an ndarray named 'image' of uint8 or uint16, (H, W) or (H, W, C) with C "
            "= 1, 3 or 4), a label (int, float, ndarray, or bytes for a mask), and distinct names for all fields."
        )
    return fields, image, label


def fetch_tables(path: Path, patience: float, most: int | None) -> tuple[Any, list[Field], Field, Field]:
    """Return header, fields, image and label; of a remote file with at most so many samples (None: any
    number), fetch all tables."""
    mirror = mirror_at(path, patience)
    if mirror is None:
        header = read_header(path)
        return header, *_read_fields(path, header)
    try:
        mirror.fetch(np.array([0]), min(HEADER.itemsize, mirror.size))
        header = read_header(path)
        start = min(tables_start(int(header["num_fields"])), mirror.size)
        mirror.fetch(np.array([0]), start)
        fields, image, label = _read_fields(path, header)
        if most is not None and header["num_samples"] > most:
            return header, fields, image, label
        end = min(tables_end(int(header["num_samples"]), fields) + SEAL_BYTES, mirror.size)
        table = min(int(header["alloc_table_ptr"]), mirror.size)
        mirror.fetch(np.array([start, table]), np.array([end - start, mirror.size - table]))
    finally:
        mirror.close()
    return header, fields, image, label


def image_field(fields: list[Field]) -> Field | None:
    """Return the image: the only `rgb_image`, else the ndarray named `image` whose shape and type are an image's."""
    pictures = [field for field in fields if field.kind == "rgb_image"]
    pictures = pictures or [field for field in fields if field.name == "image" and _is_picture(field)]
    return pictures[0] if len(pictures) == 1 else None


def _is_picture(field: Field) -> bool:
    if field.kind != "ndarray" or field.dtype.str not in ("|u1", "<u2") or len(field.shape) not in (2, 3):
        return False
    return max(field.shape[:2]) <= 0xFFFF and field.shape[2:] in ((), *((channels,) for channels in CHANNELS))


def label_field(fields: list[Field]) -> Field | None:
    """Return the label: the field named `label`, else the first number or array, else the first bytes (a mask)."""
    image = image_field(fields)
    numeric = [field for field in fields if field.kind in ("int", "float", "ndarray") and field is not image]
    masks = [field for field in fields if field.kind == "bytes"]
    named = [field for field in numeric + masks if field.name == "label"]
    return next(iter(named or numeric or masks), None)


def read_columns(path: Path, data: OpenFile, header: Any, fields: list[Field]) -> dict[str, Column]:
    """Return the fields of all samples by name, validated; not yet whether labels are possible."""
    end = check_places(path, data, header, fields)
    rows = data[tables_start(len(fields)) : end].view(metadata_dtype(fields))
    table = _read_allocations(path, data, header, end, len(rows))
    return {column.field.name: column for column in _match_allocations(path, fields, rows, table)}


def _read_allocations(path: Path, data: OpenFile, header: Any, first: int, samples: int) -> Any:
    """Return the allocation table sorted by position; data may be anywhere from byte `first` to the table."""
    table = np.frombuffer(data[int(header["alloc_table_ptr"]) :].tobytes(), dtype=ALLOCATION)
    check_allocations(path, header, table, first, samples)
    ends = table["ptr"] + table["size"]
    if (table["ptr"][1:] < ends[:-1]).any():  # written by several FFCV processes, or corrupt
        table = table[np.lexsort((table["size"], table["ptr"]))]
        if (table["ptr"][:-1] + table["size"][:-1] > table["ptr"][1:]).any():
            raise BetonError(f"{path}: allocations overlap.")
    return table


def check_places(path: Path, data: OpenFile, header: Any, fields: list[Field]) -> int:
    """Return where the metadata ends; raise BetonError unless both tables are within the file."""
    end, start = tables_end(int(header["num_samples"]), fields), int(header["alloc_table_ptr"])
    if end > len(data):
        raise BetonError(
            f"{path} is truncated: {header['num_samples']} samples need {end} bytes of metadata, "
            f"the file has {len(data)}."
        )
    if start > len(data) or (len(data) - start) % ALLOCATION.itemsize:
        raise BetonError(
            f"{path} is truncated: its allocation table should start at byte {start} and fill the file in "
            f"rows of {ALLOCATION.itemsize}, but the file has {len(data)} bytes."
        )
    return end


def check_allocations(
    path: Path, header: Any, table: Any, first: int, samples: int, numbers: NDArray[np.int64] | None = None
) -> None:
    """Reject rows of the allocation table, whose `numbers` are their places in it, that point outside the data."""
    page, limit, one = np.uint64(header["page_size"]), np.uint64(header["alloc_table_ptr"]), np.uint64(1)
    ends = table["ptr"] + table["size"]
    bad = (table["sample_id"] >= samples) | (ends > limit) | (ends < table["ptr"])
    bad |= table["ptr"] < np.uint64(first)
    bad |= table["ptr"] // page != (np.maximum(ends, table["ptr"] + one) - one) // page
    if bad.any():
        at = int(np.argmax(bad))
        raise BetonError(
            f"{path}: row {at if numbers is None else numbers[at]} of the allocation table ({table[at]}) points "
            f"outside the data or crosses a page of {page} bytes."
        )


def _match_allocations(path: Path, fields: list[Field], rows: Any, table: Any) -> list[Column]:
    """Return the columns, each value matched to the one allocation of its sample that it points to."""
    empty, table = table[table["size"] == 0], table[table["size"] > 0]
    used, nothing = np.zeros(len(table), dtype=bool), np.zeros(0, dtype=np.uint64)
    empties = np.zeros(len(rows), dtype=np.int64)
    columns = []
    for number, field in enumerate(fields):
        values = rows[f"f{number}"]
        if not field.allocated:
            columns.append(Column(field, values.copy(), nothing, nothing))
            continue
        if field.kind in ("bytes", "json"):
            pointers, filled = values["ptr"].copy(), values["size"] > 0
            empties += ~filled
            if not np.isin(pointers[~filled], empty["ptr"]).all():
                raise BetonError(f"{path}: an empty value of {field.name!r} points to data that was never written.")
        else:
            pointers = (values if field.kind == "ndarray" else values["data_ptr"]).copy()
            filled = np.ones(len(rows), dtype=bool)
        sizes = np.zeros(len(rows), dtype=np.uint64)
        sizes[filled] = _claim(path, pointers, filled, table, used)
        check_sizes(path, field, values, sizes)
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
        raise BetonError(f"{path}: sample {samples[int(np.argmax(missing))]} points to data that was never written.")
    used[at] = True
    return table["size"][at]


def check_sizes(
    path: Path, field: Field, values: Any, sizes: NDArray[np.uint64], numbers: NDArray[np.int64] | None = None
) -> None:
    """Reject values of samples, these `numbers` or all, whose data cannot have the length in bytes that it has."""
    if field.kind == "rgb_image":
        mode, lengths = values["mode"], values["width"].astype(np.uint64) * values["height"] * np.uint64(3)
        wrong = (lengths == 0) | (mode > MODE_RAW) | ((mode == MODE_RAW) & (sizes != lengths))
    else:
        is_array = field.kind == "ndarray"
        lengths = np.full(len(values), field.nbytes, dtype=np.uint64) if is_array else values["size"]
        wrong = sizes != lengths
    if wrong.any():
        at = int(np.argmax(wrong))
        content = f"{field.name!r} is {field} of {lengths[at]}"
        if field.kind == "rgb_image":
            row = values[at]
            content = f"mode {row['mode']}, {row['width']} × {row['height']} pixels"
        sample = at if numbers is None else numbers[at]
        raise BetonError(f"{path}: sample {sample} has {content} in {sizes[at]} bytes, which is impossible.")


def check_numbers(path: Path, kind: str, labels: Any, classes: int, numbers: NDArray[np.int64] | None = None) -> None:
    """Reject impossible labels, such as ints read as floats because one bit of a type flipped; of samples, these
    `numbers` or all."""
    if kind == "int":
        bad = (labels < -(1 << 31)) | (labels >= (1 << 31))
        if classes:
            bad |= (labels < 0) | (labels >= classes)
        allowed = f"a class index from 0 to {classes - 1}" if classes else "a 32-bit class index"
    else:
        tiny, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max
        bad = (labels != 0) & ~((np.abs(labels) >= tiny) & (np.abs(labels) <= largest))
        allowed = "a number that fits float32"
    if bad.any():
        at = int(np.argmax(bad))
        sample = at if numbers is None else numbers[at]
        raise BetonError(
            f"{path}: sample {sample} has the label {labels[at]}, which is not {allowed}. Convert the data again."
        )
