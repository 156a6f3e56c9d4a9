"""Checks of option values when a transform is constructed, so that a recipe fails before any work is done."""

from __future__ import annotations

from typing import Any

from ...common.checks import is_flag, is_number, is_whole
from ...common.errors import PlanError


def check_bool(owner: object, field: str) -> None:
    """Raise `PlanError` unless the field is `True` or `False`; 0, 1 and "yes" are mistakes in a recipe."""
    value = getattr(owner, field)
    if not is_flag(value):
        raise _bad(owner, field, value, "pass True or False")


def check_count(owner: object, field: str, least: int = 0) -> None:
    """Raise `PlanError` unless the field is an integer ≥ `least`."""
    value = getattr(owner, field)
    if not is_whole(value, least):
        raise _bad(owner, field, value, f"pass an integer ≥ {least}")


def check_fraction(owner: object, field: str, *, one: bool = False) -> None:
    """Raise `PlanError` unless the field is a number in [0, 1), or in [0, 1] with `one`."""
    value = getattr(owner, field)
    if not is_number(value, "[0, 1]" if one else "[0, 1)"):
        raise _bad(owner, field, value, "pass a number in [0, 1]" if one else "pass a number in [0, 1)")


def check_size(owner: object, field: str) -> None:
    """Raise `PlanError` unless the field is an integer ≥ 1, or a fraction in (0, 1)."""
    value = getattr(owner, field)
    if not is_number(value, "(0, inf)") or (value >= 1 and value != int(value)):
        raise _bad(owner, field, value, "pass an integer ≥ 1, or a fraction in (0, 1)")


def check_choice(owner: object, field: str, choices: tuple[str, ...]) -> None:
    """Raise `PlanError` unless the field is one of `choices`."""
    value = getattr(owner, field)
    if value not in choices:
        raise _bad(owner, field, value, f"pass one of {', '.join(map(repr, choices))}")


def check_range(owner: object, field: str, interval: str) -> None:
    """Raise `PlanError` unless the field is a finite number in `interval`, written as "(0, 1]"."""
    value = getattr(owner, field)
    if not is_number(value, interval):
        raise _bad(owner, field, value, f"pass a number in {interval}")


def _bad(owner: object, field: str, value: Any, remedy: str) -> PlanError:
    return PlanError(f"{type(owner).__name__}({field}={value!r}): {remedy}.")
