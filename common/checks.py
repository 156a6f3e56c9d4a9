"""Validate values from users: `is_…` and `are_…` return whether a value is valid; `check_…` raises the caller's error,
with what is allowed."""

import dataclasses
import inspect
import math
import sys
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, TypeGuard

from .errors import DrivetrainError, suggest

ANY = "(-inf, inf)"


def is_flag(value: object) -> TypeGuard[bool]:
    return isinstance(value, bool)


def is_whole(value: object, low: int | None = None, high: int | None = None) -> TypeGuard[int]:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def is_number(value: object, interval: str = ANY) -> TypeGuard[float]:
    """Return whether `value` is a finite int or float in `interval`, written as `"(0, 1]"`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        return False
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    above = number > low or (number == low and interval[0] == "[")
    below = number < high or (number == high and interval[-1] == "]")
    return math.isfinite(number) and above and below


def are_numbers(value: object, count: int, interval: str = ANY) -> TypeGuard[tuple[float, ...] | list[float]]:
    return isinstance(value, tuple | list) and len(value) == count and all(is_number(x, interval) for x in value)


def whole_text(low: int | None = None, high: int | None = None) -> str:
    if high is not None:
        return f"an integer from {low} to {high}"
    words = {None: "an integer", 0: "an integer, 0 or more", 1: "a positive integer"}
    return words.get(low, f"an integer, {low} or more")


def number_text(interval: str = ANY) -> str:
    where = {ANY: "", "(0, inf)": " above 0", "[0, inf)": ", 0 or more"}
    return f"a finite number{where.get(interval, f' in {interval}')}"


def check_flag(name: str, value: object, error: type[DrivetrainError]) -> None:
    if not is_flag(value):
        raise error(f"{name}={value!r:.80} must be True or False.")


def check_whole(
    name: str,
    value: object,
    error: type[DrivetrainError],
    low: int | None = None,
    high: int | None = None,
    *,
    also: str = "",
) -> None:
    """Raise `error` unless `value` is an int from `low` to `high`; `also` completes the message with alternatives."""
    if not is_whole(value, low, high):
        raise error(f"{name}={value!r:.80} must be {whole_text(low, high)}{also}.")


def check_number(
    name: str, value: object, error: type[DrivetrainError], interval: str = ANY, *, also: str = ""
) -> None:
    """Raise `error` unless `value` is a finite number in `interval`; `also` completes the message with alternatives."""
    if not is_number(value, interval):
        raise error(f"{name}={value!r:.80} must be {number_text(interval)}{also}.")


def check_fields(place: str, kind: Any, options: Iterable[str], error: type[DrivetrainError]) -> None:
    """Raise `error` for an option that the class `kind` does not take, with the closest one."""
    known = [*inspect.signature(kind).parameters]
    for option in options:
        if option not in known:
            tail = suggest(option, known) if known else " It has no options."
            raise error(f"{place} has no option {option!r}.{tail}")


def check_picklable(what: str, value: object, to: str, remedy: str, error: type[DrivetrainError]) -> None:
    """Raise `error` unless `value` can be pickled, as to send it to the process `to`."""
    import cloudpickle  # here: only runs on several ranks need it

    try:
        cloudpickle.dumps(value)
    except Exception as reason:  # the object's own code may raise anything
        raise error(f"{what} cannot be sent to {to} ({type(reason).__name__}: {reason}). {remedy}") from reason


def plain(value: Any) -> Any:
    """Convert numbers of numpy and other libraries to Python's, also in a tuple or list; return other values as is."""
    if type(value) in (tuple, list):
        return type(value)(plain(each) for each in value)
    numpy = sys.modules.get("numpy")  # not imported for this: without it, nothing is one of its values
    if numpy is not None and isinstance(value, numpy.bool_):
        return bool(value)
    if isinstance(value, int):  # also a subclass, such as an IntEnum
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return value


def make_plain(owner: Any) -> None:
    """Apply `plain` to the fields of a dataclass, even a frozen one: JSON and messages need Python's numbers."""
    for field in dataclasses.fields(owner):
        object.__setattr__(owner, field.name, plain(getattr(owner, field.name)))
