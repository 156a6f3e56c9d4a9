"""Values of a sample besides its image: the field each one needs, and the bytes that are stored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from ...common.errors import DataError
from ..beton.layout import KINDS, Field
from ..beton.targets import MOVING, STORED_AS
from .moving import is_mask

SMALLEST_TARGET, LARGEST_TARGET = (
    float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max)
)
"""Float labels are loaded as float32; smaller values become zero."""

EXTRA_KINDS = (*(kind for kind in KINDS if kind != "rgb_image"), *MOVING)

Stored = int | float | bytes
"""A value as stored in the file: a number in the metadata, or bytes on a page."""


def requested_fields(fields: Sequence[str] | Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Return the `fields=` of `convert` as name to kind; None where the first sample decides.

    Raises:
        DataError: for a name or kind that the format does not support.
    """
    if isinstance(fields, str):
        raise DataError(f"fields={fields!r} must be a list of names, or a mapping of names to kinds.")
    wanted: dict[str, str | None] = (
        dict(fields) if isinstance(fields, Mapping) else dict.fromkeys(fields or [])
    )
    if fields is not None and len(wanted) != len(fields):
        raise DataError(f"fields={list(fields)} contains a name twice.")
    for name, kind in wanted.items():
        if (
            not isinstance(name, str)
            or not 1 <= len(name) <= 16
            or not (name.isascii() and name.isprintable())
        ):
            raise DataError(f"The field {name!r} must have a name of 1 to 16 printable ASCII characters.")
        if name in ("image", "label"):
            raise DataError(f"The field {name!r} is always included. List only further fields.")
        if kind is not None and kind not in EXTRA_KINDS:
            raise DataError(
                f"The field {name!r} has the unknown kind {kind!r}. Use one of {', '.join(EXTRA_KINDS)}."
            )
    return wanted


def label_field(label: Any) -> Field:
    """Return the field for labels like this one: int (later labels may make it float), float32 vector, or mask (bytes).

    Raises:
        DataError: if it is none of them.
    """
    if is_mask(label):
        return Field("label", STORED_AS["mask"])
    if (vector := _vector(label)) is not None:
        return Field("label", "ndarray", np.dtype("<f4"), vector.shape)
    return Field("label", "float" if isinstance(plain_label(label), float) else "int")


def store_label(field: Field, label: Any) -> Stored:
    """Return a label as stored in the file.

    Raises:
        DataError: if its kind differs from the first label's.
    """
    vector = _vector(label)
    if field.kind != "ndarray":
        if vector is not None:
            raise DataError(f"its label has {len(vector)} values, but the first sample's is a single number")
        return plain_label(label)
    if vector is None or vector.shape != field.shape:
        raise DataError(f"its label is {_short(label)}, but the first sample's has {field.shape[0]} values")
    if not np.isfinite(vector).all():
        raise DataError(f"its label is {_short(label)}; a target must be finite and fit float32")
    return vector.tobytes()


def _vector(label: Any) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """Return a label of several values, `(K,)`, as float32; None if it is not one."""
    array = _array(label)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iuf" or not len(array):
        return None
    with np.errstate(over="ignore"):  # too large becomes infinite, which is rejected
        return array.astype("<f4")


def plain_label(label: Any) -> int | float:
    """Return a label as a Python int or finite float.

    Raises:
        DataError: if it is neither.
    """
    if isinstance(label, torch.Tensor | np.ndarray | np.generic) and getattr(label, "ndim", 0) == 0:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int | float):
        raise DataError(
            f"its label is {_short(label)}; expected an int (class), a float (target), a vector of them or a mask"
        )
    if isinstance(label, float) and not abs(label) <= LARGEST_TARGET:
        raise DataError(f"its label is {label}; a target must be finite and fit float32")
    if isinstance(label, int) and abs(label) >= 1 << 31:
        raise DataError(f"its label is {label}; a class index must fit 32 bits")
    if isinstance(label, float) and abs(label) < SMALLEST_TARGET:
        return 0.0
    return label


def infer_field(name: str, kind: str | None, value: Any) -> Field:
    """Return the field for values like this one.

    Args:
        name: of the field.
        kind: one of `EXTRA_KINDS`, or None to infer it: int or bool → int; float → float; bytes → bytes; arrays,
            tensors and lists of numbers → ndarray; anything else that JSON supports → json. Targets that move with the
            image are never inferred.
        value: the first sample's.

    Raises:
        DataError: if no kind, or not the given one, can store it.
    """
    if kind in MOVING:
        return Field(name, STORED_AS[kind])  # values are checked with the size of their image
    kind = kind or _natural_kind(value)
    if kind != "ndarray":
        field = Field(name, kind)
    else:
        array = _array(value)
        if array is None or array.dtype.kind not in "biufc" or not array.ndim or not array.size:
            raise DataError(f"its field {name!r} is {_short(value)}; expected an array of numbers")
        field = Field(name, kind, array.dtype, array.shape)
    store_value(field, value)
    return field


def _natural_kind(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    array = _array(value)
    if array is None or array.dtype.kind not in "biufc":
        return "json"
    if array.ndim:
        return "ndarray"
    return "float" if array.dtype.kind == "f" else "int"


def store_value(field: Field, value: Any) -> Stored:
    """Return a value as stored in the file.

    Raises:
        DataError: if the field cannot store it, e.g. an array with another shape than the first.
    """
    try:
        stored: Stored = _STORE[field.kind](field, value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = f": {error}" if isinstance(error, _Mismatch) else ""
        raise DataError(
            f"its field {field.name!r} is {_short(value)}, but should be {field}{reason}"
        ) from None
    return stored


class _Mismatch(ValueError):
    """A value that its field cannot store, with the reason."""


def _store_int(_: Field, value: Any) -> int:
    value = value.item() if isinstance(value, torch.Tensor | np.ndarray) else value
    if not isinstance(value, Integral):
        raise _Mismatch("it is not an integer")
    if not -(1 << 63) <= int(value) < 1 << 63:
        raise _Mismatch("it does not fit 64 bits")
    return int(value)


def _store_float(_: Field, value: Any) -> float:
    value = value.item() if isinstance(value, torch.Tensor | np.ndarray) else value
    if not isinstance(value, Real):
        raise _Mismatch("it is not a number")
    return float(value)


def _store_bytes(_: Field, value: Any) -> bytes:
    array = _array(value)
    if array is not None and array.dtype == np.uint8 and array.ndim == 1:
        return array.tobytes()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _Mismatch("it is neither bytes nor a 1-D uint8 array")
    return bytes(value)


def _store_array(field: Field, value: Any) -> bytes:
    array = _array(value)
    if array is None or array.shape != field.shape:
        raise _Mismatch("the first sample's shape differs")
    if array.dtype != field.dtype:
        raise _Mismatch("the first sample's type differs")
    return array.tobytes()


def _store_json(_: Field, value: Any) -> bytes:
    """Store the text and a terminating zero byte, like FFCV's JSONField."""
    return json.dumps(value).encode() + b"\0"


_STORE: dict[str, Any] = {
    "int": _store_int,
    "float": _store_float,
    "bytes": _store_bytes,
    "ndarray": _store_array,
    "json": _store_json,
}


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return arrays, tensors, numbers and lists of numbers as a little-endian, contiguous array; else None."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray | np.generic | bool | int | float | list | tuple):
        return None
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # ragged, or mixed types
        return None
    if array.dtype.kind not in "biufc":
        return None
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(array.shape)


def _short(value: Any) -> str:
    """Return a value shortened for a message."""
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim:
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"{value!r:.80}"
