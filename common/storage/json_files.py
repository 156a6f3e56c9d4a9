"""Read JSON files of ours: their values are checked against a type, and an error names file, field and remedy. Write
JSON for other programs."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import DrivetrainError

T = TypeVar("T")


class ShapeError(ValueError):
    """A value of a wrong type; the message, such as "its step: expected `int`, got `str`", continues a sentence."""


def convert(value: object, shape: type[T]) -> T:
    """Return JSON values as a `shape`, a type of msgspec; a ShapeError names the first field that does not fit."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        what = what[:1].lower() + what[1:]
        raise ShapeError(f"its {place.strip('.`')}: {what}" if place else what) from None


def parse(text: bytes, shape: type[T]) -> T:
    """Return the content of a JSON file as a `shape`; raise ShapeError if it is not JSON, or has another shape."""
    try:  # json, because it also reads the infinities that Python writes
        return convert(json.loads(text), shape)
    except ShapeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"it is not JSON ({error})") from None


def read(path: Path, shape: type[T], error: type[DrivetrainError], remedy: str) -> T:
    """Return a JSON file's content as a `shape`; an `error` names the file, the field and the `remedy`, a sentence."""
    try:
        return parse(path.read_bytes(), shape)
    except (FileNotFoundError, NotADirectoryError):  # what that means, the caller knows
        raise
    except ShapeError as reason:
        raise error(f"{path} is damaged: {reason}. {remedy}") from None
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}. {remedy}") from None


def to_json(value: object, indent: int | None = None) -> str:
    """Return JSON values as text. Numbers that are not finite are null: JSON has none, though `json.dumps` writes
    them."""
    return json.dumps(finite(value), ensure_ascii=False, indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """Return JSON values with None in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
