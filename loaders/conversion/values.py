"""Values of a sample besides its image: the field each one needs, and how it is stored. Masks, boxes and keypoints are
taken in any form, and scaled as their image is."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ...common.checks import is_whole, plain
from ...common.errors import DataError
from ..beton import targets
from ..beton.layout import KINDS, Field
from .encode import Encoded

# Float labels are loaded as float32; smaller values become zero.
_SMALLEST_TARGET, _LARGEST_TARGET = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

_EXTRA_KINDS = (*(kind for kind in KINDS if kind != "rgb_image"), *targets.MOVING)
_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B")  # of Pillow's images with one integer per pixel

Stored = int | float | bytes  # a number in the metadata, or bytes on a page
Size = tuple[int, int]  # width and height
Colors = dict[int, str]  # `"#rrggbb"` by class index


def requested_fields(fields: Sequence[str] | Mapping[str, str | None] | None) -> dict[str, str | None]:
    if fields is not None and not _is_ordered(fields):
        raise DataError(f"fields={fields!r} must be a list of names, or a mapping of names to kinds.")
    names: list[Any] = [] if fields is None else list(fields)
    for name in names:  # before they are keys, which a list cannot be
        if not isinstance(name, str) or not re.fullmatch("[ -~]{1,16}", name):
            raise DataError(f"The field {name!r} must have a name of 1 to 16 printable ASCII characters.")
    wanted = dict(fields) if isinstance(fields, Mapping) else dict.fromkeys(names)
    if len(wanted) != len(names):
        raise DataError(f"fields={names} contains a name twice.")
    for name, kind in wanted.items():
        if name in ("image", "label"):
            raise DataError(f"The field {name!r} is always included. List only further fields.")
        if kind is not None and kind not in _EXTRA_KINDS:
            raise DataError(f"The field {name!r} has the unknown kind {kind!r}. Use one of {', '.join(_EXTRA_KINDS)}.")
    return wanted


def requested_classes(classes: Sequence[str] | None) -> list[str] | None:
    """Return names of classes as a list, also of an array. One text would be a class for each letter, and a file whose
    manifest has other values than texts could not be opened."""
    if classes is None:
        return None
    names: list[Any] = list(classes) if _is_ordered(classes) else [None]
    if not all(isinstance(name, str) for name in names):
        raise DataError(f"classes={classes!r:.80} must be a list of names in label order, such as ['cat', 'dog'].")
    return list(map(str, names))


def _is_ordered(names: Any) -> bool:
    """Whether these may be names in an order. That of a set is another one in each process."""
    return isinstance(names, Iterable) and not isinstance(names, str | set | frozenset)


def label_field(label: Any) -> Field:
    """Return the field for labels like this one: int (later ones may make it float), float32 vector, or mask (bytes): a
    picture, a PNG file's bytes, or an array of two or more dimensions."""
    is_array = isinstance(label, np.ndarray | torch.Tensor)
    if isinstance(label, Image.Image | bytes) or (is_array and label.ndim >= 2):
        return Field("label", targets.STORED_AS["mask"])
    if (vector := _vector(label)) is not None:
        return Field("label", "ndarray", np.dtype("<f4"), vector.shape)
    return Field("label", "float" if isinstance(_plain_label(label), float) else "int")


def store_label(field: Field, label: Any) -> Stored:
    """Return a label as stored in the file. Its kind must be the first label's."""
    vector = _vector(label)
    if field.kind != "ndarray":
        if vector is not None:
            raise DataError(f"its label has {len(vector)} values, but the first sample's is a single number")
        return _plain_label(label)
    if vector is None or vector.shape != field.shape:
        raise DataError(f"its label is {_short(label)}, but the first sample's has {field.shape[0]} values")
    if not np.isfinite(vector).all():
        raise DataError(f"its label is {_short(label)}; a target must be finite and fit float32")
    return vector.tobytes()


def _vector(label: Any) -> NDArray[np.float32] | None:
    """Return a label of several values, `(K,)`; None if it is not one."""
    array = _array(label)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iuf" or not len(array):
        return None
    with np.errstate(over="ignore"):  # too large becomes infinite, which is rejected
        return array.astype("<f4")


def _plain_label(label: Any) -> int | float:
    if isinstance(label, torch.Tensor | np.ndarray | np.generic) and getattr(label, "ndim", 0) == 0:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int | float):
        raise DataError(
            f"its label is {_short(label)}; expected an int (class), a float (target), a vector of them or a mask"
        )
    if isinstance(label, float) and not abs(label) <= _LARGEST_TARGET:
        raise DataError(f"its label is {label}; a target must be finite and fit float32")
    if isinstance(label, int) and abs(label) >= 1 << 31:
        raise DataError(f"its label is {label}; a class index must fit 32 bits")
    return 0.0 if isinstance(label, float) and abs(label) < _SMALLEST_TARGET else label


def infer_field(name: str, kind: str | None, value: Any) -> Field:
    """Return the field for values like this one, the first sample's; a `kind` of None is inferred: anything that is no
    number, bytes or array of numbers is json. Targets that move with the image are never inferred."""
    if kind in targets.MOVING:
        return Field(name, targets.STORED_AS[kind])  # values are checked with the size of their image
    array = _array(value) if kind in (None, "ndarray") else None
    kind = kind or _natural_kind(value, array)
    field = Field(name, kind)
    if kind == "ndarray":
        if array is None or not array.ndim or not array.size:
            raise DataError(f"its field {name!r} is {_short(value)}; expected an array of numbers")
        field = Field(name, kind, array.dtype, array.shape)
    store_value(field, value)
    return field


def _natural_kind(value: Any, array: NDArray[Any] | None) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    if array is None:
        return "json"
    if array.ndim:
        return "ndarray"
    return "float" if array.dtype.kind == "f" else "int"


class _Mismatch(ValueError):
    """A value that its field cannot store, with the reason."""


def store_value(field: Field, value: Any) -> Stored:
    try:
        stored: Stored = _STORE[field.kind](field, value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = f": {error}" if isinstance(error, _Mismatch) else ""
        raise DataError(f"its field {field.name!r} is {_short(value)}, but should be {field}{reason}") from None
    return stored


def _store_number(field: Field, value: Any) -> int | float:
    value = value.item() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value
    if field.kind == "float":
        if not isinstance(value, Real):
            raise _Mismatch("it is not a number")
        return float(value)
    if not isinstance(value, Integral):
        raise _Mismatch("it is not an integer")
    if not -(1 << 63) <= int(value) < 1 << 63:
        raise _Mismatch("it does not fit 64 bits")
    return int(value)


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


def _parsed(value: Any) -> Any:
    """Return the value of a JSON file's bytes, such as those of a shard's member `.boxes.json`; others as they are."""
    return json.loads(value) if isinstance(value, bytes) else value


def _json_bytes(value: Any) -> bytes:
    """Return the text and a terminating zero byte, like FFCV's JSONField."""
    return json.dumps(value).encode() + b"\0"


_STORE: dict[str, Any] = {
    "int": _store_number, "float": _store_number, "bytes": _store_bytes, "ndarray": _store_array,
    "json": lambda _, value: _json_bytes(_parsed(value)),
}  # fmt: skip


def _array(value: Any) -> NDArray[Any] | None:
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
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim:
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"{value!r:.80}"


def check_mask_map(given: Mapping[int, int] | None) -> dict[int, int]:
    """Return the values of masks to replace, old to new."""
    if given is not None and not isinstance(given, Mapping):
        raise DataError(f"mask_map={given!r:.80} must map values of masks to others, such as {{11: 255}}.")
    changes = {plain(old): plain(new) for old, new in (given or {}).items()}
    for value in (each for pair in changes.items() for each in pair):
        if not is_whole(value, 0, 0xFFFF):
            raise DataError(f"mask_map={given!r:.80}: {value!r} must be an integer from 0 to 65535.")
    return {int(old): int(new) for old, new in changes.items()}


def store_target(
    name: str, kind: str, value: Any, encoded: Encoded, classes: int, mask_map: Mapping[int, int]
) -> tuple[bytes, Colors]:
    """Return a mask, boxes or keypoints of the upright image, before it was scaled, as stored in the file; and the
    colors of a mask with a palette. `classes`: number of classes that a mask's indices may have, besides 255; 0: any.
    `mask_map`: its values to replace."""
    stored = encoded.width, encoded.height
    try:
        if kind != "mask":
            return _json_bytes(_scaled_coordinates(kind, _parsed(value), encoded.upright, stored)), {}
        own = _indices(value, encoded.upright)
        indices = _mapped(own, mask_map)
        if classes:
            targets.check_classes(indices, classes)
        scaled = indices if stored == encoded.upright else _nearest(indices, stored)
        return targets.encode_mask(scaled), _colors(value, own, mask_map)
    except ValueError as error:
        raise DataError(f"its {kind} {name!r}: {error}") from None


def _indices(value: Any, size: Size) -> NDArray[Any]:
    """Return a mask's class indices, `(H, W)`. The size is checked before pixels are decoded."""
    if isinstance(value, bytes):
        return targets.decode_mask(value, size[1], size[0])
    if isinstance(value, Image.Image):
        if value.mode not in _MODES:
            raise ValueError(
                f"it is an image of mode {value.mode}; expected one class index per pixel: mode P, L, 1 or I;16"
            )
        targets.check_size(value.size, size)
        try:
            return np.asarray(value)
        except MemoryError:
            raise
        except Exception as error:  # opened lazily, so it may still be damaged
            raise ValueError(f"it cannot be decoded ({error})") from None
    indices = _numbers(value)
    if indices.ndim == 3 and len(indices) == 1:
        indices = indices[0]
    if indices.ndim != 2 or indices.dtype.kind not in "biu":
        raise ValueError(
            f"it is {indices.dtype} of shape {indices.shape}; expected one class index per pixel: integers of shape "
            "(H, W)"
        )
    targets.check_size(indices.shape[::-1], size)
    return indices


def _mapped(indices: NDArray[Any], mask_map: Mapping[int, int]) -> NDArray[Any]:
    """Return a mask with all values replaced at once, so that two can change places."""
    if not mask_map:
        return indices
    wide = indices.astype(np.int64)
    changed = wide.copy()
    for old, new in mask_map.items():
        changed[wide == old] = new
    return changed


def _colors(value: Any, indices: NDArray[Any], mask_map: Mapping[int, int]) -> Colors:
    """Return the colors of the classes in a mask with a palette. A class has the color of its own index, if that is
    in the mask, or that of the lowest one that became it."""
    if isinstance(value, bytes):
        colors = targets.palette_of(value)
    else:
        colors = bytes(value.getpalette() or ()) if getattr(value, "mode", "") == "P" else b""
    found: Colors = {}
    if colors:
        used = np.flatnonzero(np.bincount(indices.ravel(), minlength=256)[: len(colors) // 3]).tolist()
        for index in sorted(used, key=lambda index: mask_map.get(index, index) != index):
            found.setdefault(mask_map.get(index, index), f"#{colors[3 * index : 3 * index + 3].hex()}")
    return {index: color for index, color in found.items() if index < targets.NOT_COUNTED}


def _numbers(value: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = (value.double() if value.is_floating_point() else value).detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.array(None)


def _nearest(indices: NDArray[Any], size: Size) -> NDArray[Any]:
    """Return a mask scaled to another size: for each pixel the one at its top left corner, as in PyTorch."""
    (height, width), (columns, rows) = indices.shape, size
    return indices[targets.nearest_places(height, rows)[:, None], targets.nearest_places(width, columns)]


def _scaled_coordinates(kind: str, value: Any, upright: Size, stored: Size) -> list[Any]:
    if isinstance(value, torch.Tensor):  # perhaps torchvision's, which has a format and a canvas
        form, canvas = getattr(value, "format", None), getattr(value, "canvas_size", None)
        if form is not None and getattr(form, "name", form) != "XYXY":
            raise ValueError(
                f"their format is {getattr(form, 'name', form)}; convert them to XYXY with torchvision's "
                "ConvertBoundingBoxFormat"
            )
        if canvas is not None and tuple(canvas) != upright[::-1]:
            raise ValueError(
                f"their canvas is {tuple(canvas)} (height, width), but their image is {upright[::-1]}, upright"
            )
    array = targets.coordinates(kind, _numbers(value))
    if stored != upright:
        array = array * np.tile(np.array(stored) / np.array(upright), array.shape[1] // 2)
    return list(array.tolist())
