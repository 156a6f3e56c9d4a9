"""Checks of option values, made when a transform is constructed, so that a recipe fails before any work."""

from __future__ import annotations

from typing import Any

from ...checks import is_flag, is_number, is_whole
from ...errors import PlanError


def check_bool(owner: object, field: str) -> None:
    """Raises a `PlanError` unless the field is `True` or `False`; 0, 1 and "yes" are mistakes in a recipe."""
    value = getattr(owner, field)
    if not is_flag(value):
        raise _bad(owner, field, value, "give true or false")


def check_count(owner: object, field: str, least: int = 0) -> None:
    """Raises a `PlanError` unless the field is a whole number ≥ `least`."""
    value = getattr(owner, field)
    if not is_whole(value, least):
        raise _bad(owner, field, value, f"give a whole number ≥ {least}")


def check_fraction(owner: object, field: str, *, one: bool = False) -> None:
    """Raises a `PlanError` unless the field is a number in [0, 1), or in [0, 1] with `one`."""
    value = getattr(owner, field)
    if not is_number(value, "[0, 1]" if one else "[0, 1)"):
        raise _bad(
            owner, field, value, "give a number from 0 to 1" if one else "give a number from 0 to below 1"
        )


def check_size(owner: object, field: str) -> None:
    """Raises a `PlanError` unless the field is a whole number ≥ 1, or a share in (0, 1) of something."""
    value = getattr(owner, field)
    if not is_number(value, "(0, inf)") or (value >= 1 and value != int(value)):
        raise _bad(owner, field, value, "give a whole number ≥ 1, or a share above 0 and below 1")


def check_choice(owner: object, field: str, choices: tuple[str, ...]) -> None:
    """Raises a `PlanError` unless the field is one of `choices`."""
    value = getattr(owner, field)
    if value not in choices:
        raise _bad(owner, field, value, f"give one of {', '.join(map(repr, choices))}")


def check_range(owner: object, field: str, interval: str) -> None:
    """Raises a `PlanError` unless the field is a finite number in `interval`, written as "(0, 1]"."""
    value = getattr(owner, field)
    if not is_number(value, interval):
        raise _bad(owner, field, value, f"give a number in {interval}")


def _bad(owner: object, field: str, value: Any, remedy: str) -> PlanError:
    return PlanError(f"{type(owner).__name__}({field}={value!r}): {remedy}.")
