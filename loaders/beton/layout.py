"""The `.beton` format (FFCV's, version 2): its tables, and the kinds of fields a sample may have.

Layout, little-endian: header · field descriptors · metadata · padding up to a page · pages · allocation
table to the end of the file. The padding is zeros; Drivetrain stores its seal in its first bytes (`manifest`).
Source: libffcv/ffcv, `ffcv/types.py`, `ffcv/fields` and `ffcv/writer.py` (1.0.2).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 2
HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_size", "<u4"),
        ("num_samples", "<u8"),
        ("alloc_table_ptr", "<u8"),
    ]
)
FIELD = np.dtype([("type_id", "u1"), ("name", "u1", (16,)), ("arguments", "u1", (1024,))])
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])
IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
BLOB = np.dtype([("ptr", "<u8"), ("size", "<u8")])
"""The metadata of bytes and JSON fields."""
MODE_JPEG, MODE_RAW = 0, 1
MIN_PAGE, MAX_PAGE = 1 << 21, 1 << 31

FLOAT_FIELD, INT_FIELD, IMAGE_FIELD, BYTES_FIELD, NDARRAY_FIELD, JSON_FIELD = range(6)
KINDS = {
    "float": FLOAT_FIELD,
    "int": INT_FIELD,
    "rgb_image": IMAGE_FIELD,
    "bytes": BYTES_FIELD,
    "ndarray": NDARRAY_FIELD,
    "json": JSON_FIELD,
}
"""Maps a field's kind to its type number in the file."""
METADATA_TYPES = {
    FLOAT_FIELD: np.dtype("<f8"),
    INT_FIELD: np.dtype("<i8"),
    IMAGE_FIELD: IMAGE,
    BYTES_FIELD: BLOB,
    NDARRAY_FIELD: np.dtype("<u8"),
    JSON_FIELD: BLOB,
}
_ARRAY_ARGUMENTS = np.dtype([("shape", "<u8", (32,)), ("type_length", "<u8")])


@dataclass(frozen=True)
class Field:
    """One field of every sample.

    Attributes:
        name: ASCII, at most 16 characters.
        kind: a key of `KINDS`.
        dtype, shape: of an ndarray; unused for the other kinds.
    """

    name: str
    kind: str
    dtype: np.dtype[Any] = np.dtype("u1")  # noqa: RUF009 — dtypes are immutable
    shape: tuple[int, ...] = ()

    @property
    def type_id(self) -> int:
        """The kind's type number in the file."""
        return KINDS[self.kind]

    @property
    def nbytes(self) -> int:
        """Length of an ndarray's data, in bytes."""
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
        row["type_id"] = self.type_id
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
        """Return the field of a `descriptor` row.

        Raises:
            ValueError: naming what is invalid in the row.
        """
        name, *rest = bytes(row["name"]).split(b"\0")
        if not name or any(rest) or not name.isascii() or not name.decode("ascii").isprintable():
            raise ValueError(f"the name {bytes(row['name'])!r} is not ASCII, padded with zeros")
        kind = {number: kind for kind, number in KINDS.items()}.get(int(row["type_id"]))
        if kind is None:
            raise ValueError(f"the field {name.decode()!r} has the unknown type {row['type_id']}")
        field = cls(name.decode("ascii"), kind)
        if kind == "ndarray":
            return cls(field.name, kind, *_array_arguments(row["arguments"]))
        if row["arguments"].any():
            raise ValueError(f"the {kind} field {field.name!r} has arguments, which this kind does not take")
        return field


def _array_arguments(stored: NDArray[np.uint8]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of an ndarray field."""
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
    except (ValueError, TypeError) as error:
        raise ValueError(f"an ndarray field has an invalid dtype ({error})") from None
    if empty != "" or dtype.kind not in "biufc" or dtype.str != description:
        raise ValueError(f"an ndarray field has the dtype {description!r}, which is not a plain number")
    return dtype, shape


def metadata_dtype(fields: Sequence[Field]) -> np.dtype[Any]:
    """Return the dtype of a metadata row: a column `f0`, `f1`, … per field, aligned as in C."""
    columns: Any = [("", METADATA_TYPES[field.type_id]) for field in fields]
    dtype: np.dtype[Any] = np.dtype(columns, align=True)
    return dtype


def tables_start(fields: int) -> int:
    """Return where the metadata begins: after the header and `fields` field descriptors."""
    return HEADER.itemsize + fields * FIELD.itemsize
