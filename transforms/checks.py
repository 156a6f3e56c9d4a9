"""Checks of option values, made when a transform is constructed, so that a recipe fails before any work."""

from __future__ import annotations

import math
from typing import Any

from ..errors import PlanError


def check_bool(owner: object, field: str) -> None:
    """Raises a `PlanError` unless the field is `True` or `False`; 0, 1 and "yes" are mistakes in a recipe."""
    value = getattr(owner, field)
    if not isinstance(value, bool):
        raise _bad(owner, field, value, "give true or false")


def check_count(owner: object, field: str, least: int = 0) -> None:
    """Raises a `PlanError` unless the field is a whole number ≥ `least`."""
    value = getattr(owner, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(owner, field, value, f"give a whole number ≥ {least}")


def check_fraction(owner: object, field: str, *, one: bool = False) -> None:
    """Raises a `PlanError` unless the field is a number in [0, 1), or in [0, 1] with `one`."""
    value = getattr(owner, field)
    if not _is_number(value) or not (0 <= value < 1 or (one and value == 1)):
        raise _bad(
            owner, field, value, "give a number from 0 to 1" if one else "give a number from 0 to below 1"
        )


def check_size(owner: object, field: str) -> None:
    """Raises a `PlanError` unless the field is a whole number ≥ 1, or a share in (0, 1) of something."""
    value = getattr(owner, field)
    if not _is_number(value) or value <= 0 or (value >= 1 and value != int(value)):
        raise _bad(owner, field, value, "give a whole number ≥ 1, or a share above 0 and below 1")


def check_choice(owner: object, field: str, choices: tuple[str, ...]) -> None:
    """Raises a `PlanError` unless the field is one of `choices`."""
    value = getattr(owner, field)
    if value not in choices:
        raise _bad(owner, field, value, f"give one of {', '.join(map(repr, choices))}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_range(owner: object, field: str, interval: str) -> None:
    """Raises a `PlanError` unless the field is a finite number in `interval`, written as "(0, 1]"."""
    value = getattr(owner, field)
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    inside = _is_number(value) and (value > low or (value == low and interval[0] == "["))
    inside = inside and (value < high or (value == high and interval[-1] == "]"))
    if not inside:
        raise _bad(owner, field, value, f"give a number in {interval}")


def _bad(owner: object, field: str, value: Any, remedy: str) -> PlanError:
    return PlanError(f"{type(owner).__name__}({field}={value!r}): {remedy}.")
