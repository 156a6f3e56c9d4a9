"""Checks of values that users give: whole numbers, finite numbers, booleans, sequences of numbers.

`is_…` tells whether a value will do; `check_…` raises the caller's error, which names the value and what is allowed.
True is not a number, and neither infinities nor NaN are.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from numbers import Integral, Real
from typing import Any, TypeGuard

from .errors import DrivetrainError

ANY = "(-inf, inf)"


def is_flag(value: object) -> TypeGuard[bool]:
    """Return whether it is True or False; 0, 1 and "no" are not."""
    return isinstance(value, bool)


def is_whole(value: object, low: int | None = None, high: int | None = None) -> TypeGuard[int]:
    """Return whether it is an int from `low` to `high`, both included."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def is_number(value: object, interval: str = ANY) -> TypeGuard[float]:
    """Return whether it is a finite int or float in `interval`, written as `"(0, 1]"`."""
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
    """Return whether it is a tuple or list of `count` finite numbers in `interval`."""
    return (
        isinstance(value, tuple | list) and len(value) == count and all(is_number(x, interval) for x in value)
    )


def check_flag(name: str, value: object, error: type[DrivetrainError]) -> None:
    """Raise `error` unless the value is True or False."""
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
    """Raise `error` unless the value is an int from `low` to `high`; `also` names what else would do."""
    if is_whole(value, low, high):
        return
    if high is not None:
        allowed = f"an integer from {low} to {high}"
    else:
        allowed = {None: "an integer", 0: "an integer, 0 or more", 1: "a positive integer"}.get(
            low, f"an integer, {low} or more"
        )
    raise error(f"{name}={value!r:.80} must be {allowed}{also}.")


def check_number(
    name: str, value: object, error: type[DrivetrainError], interval: str = ANY, *, also: str = ""
) -> None:
    """Raise `error` unless the value is a finite number in `interval`; `also` names what else would do."""
    if not is_number(value, interval):
        where = {ANY: "", "(0, inf)": " above 0", "[0, inf)": ", 0 or more"}.get(interval, f" in {interval}")
        raise error(f"{name}={value!r:.80} must be a finite number{where}{also}.")


def plain(value: Any) -> Any:
    """Return numpy's and other libraries' numbers as Python's, also within a tuple or list; all else as it is."""
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
    """Make the numbers in the fields of a dataclass, also a frozen one, Python's: JSON and messages need them."""
    for field in dataclasses.fields(owner):
        object.__setattr__(owner, field.name, plain(getattr(owner, field.name)))
