"""Strategies of third parties: registered by name in this process, or by an installed package's entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import StrategyError

GROUP = "drivetrain.strategies"
"""The entry-point group. In a package's pyproject.toml:

    [project.entry-points."drivetrain.strategies"]
    mine = "my_package.my_module:MyStrategy"
"""

Kind = Callable[..., Any]
"""A strategy's class, or a function that makes one; its arguments are the strategy's options."""

REGISTERED: dict[str, Kind] = {}
"""What `strategies.register` was given in this process."""


def installed() -> dict[str, EntryPoint]:
    """The entry points of all installed packages, by name.

    Raises:
        StrategyError: if two packages claim one name.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:  # a package that is on the path twice claims the same thing
            raise StrategyError(
                f"Two packages bring a strategy {point.name!r}: {_package(other)} ({other.value}) and "
                f"{_package(point)} ({point.value}); uninstall one."
            )
    return found


def load(point: EntryPoint) -> Kind:
    """What an entry point names.

    Raises:
        StrategyError: if it cannot be imported, or cannot be called.
    """
    try:
        kind = point.load()
    except Exception as error:
        raise StrategyError(
            f"The strategy {point.name!r} of the package {_package(point)} ({point.value}) cannot be imported: "
            f"{type(error).__name__}: {error}. Update or uninstall that package."
        ) from error
    if not callable(kind):
        raise StrategyError(
            f"The strategy {point.name!r} of the package {_package(point)} is a {type(kind).__name__}; an entry "
            f"point of {GROUP!r} must name a class or a function that makes a strategy."
        )
    return kind  # type: ignore[no-any-return]


def call_with(registered: dict[str, Kind], function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(*args)` on a rank, where strategies are registered as in the process that launched it."""
    for name, kind in registered.items():
        REGISTERED.setdefault(name, kind)
    return function(*args)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
