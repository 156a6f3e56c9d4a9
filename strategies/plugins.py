"""Third-party strategies: registered by name in this process, or by an installed package's entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..common.errors import StrategyError

GROUP = "drivetrain.strategies"
"""The entry-point group. In a package's pyproject.toml:

    [project.entry-points."drivetrain.strategies"]
    mine = "my_package.my_module:MyStrategy"
"""

Kind = Callable[..., Any]
"""A strategy's class, or a function that creates one; its arguments are the strategy's options."""

REGISTERED: dict[str, Kind] = {}
"""The arguments of `strategies.register` in this process."""


def installed() -> dict[str, EntryPoint]:
    """Return the entry points of all installed packages, by name.

    Raises:
        StrategyError: if two packages use the same name.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:  # a package that is on the path twice has the same value
            raise StrategyError(
                f"Two packages provide a strategy {point.name!r}: {_package(other)} ({other.value}) and "
                f"{_package(point)} ({point.value}). Uninstall one."
            )
    return found


def load(point: EntryPoint) -> Kind:
    """Return the object of an entry point.

    Raises:
        StrategyError: if it cannot be imported, or is not callable.
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
            f"The strategy {point.name!r} of the package {_package(point)} is a {type(kind).__name__}. An entry point "
            f"of {GROUP!r} must name a class or a function that creates a strategy."
        )
    return kind  # type: ignore[no-any-return]


def call_with(registered: dict[str, Kind], function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` on a rank, with the strategies registered as in the process that launched it."""
    for name, kind in registered.items():
        REGISTERED.setdefault(name, kind)
    return function(*args)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
