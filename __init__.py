"""Drivetrain: FFCV loading, model surgery and sharding behind one `Pipeline`, measured by a ledger.

Names are imported at first use, so that `import drivetrain` costs nothing and pytest, which imports
this file under the name of the clone's folder, can do so without side effects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

_HOME = {
    "Checkpoints": "pipeline",
    "Pipeline": "pipeline",
    "RECIPES": "pipeline",
    "DrivetrainError": "errors",
    "DataError": "errors",
    "BetonError": "errors",
    "PlanError": "errors",
    "StrategyError": "errors",
    "RecipeError": "errors",
    "CheckpointError": "errors",
    "NonFiniteError": "errors",
    "LedgerError": "errors",
    "MissingExtra": "errors",
}

__all__ = [
    "RECIPES",
    "BetonError",
    "CheckpointError",
    "Checkpoints",
    "DataError",
    "DrivetrainError",
    "LedgerError",
    "MissingExtra",
    "NonFiniteError",
    "Pipeline",
    "PlanError",
    "RecipeError",
    "StrategyError",
]

if TYPE_CHECKING:
    from .errors import (
        BetonError,
        CheckpointError,
        DataError,
        DrivetrainError,
        LedgerError,
        MissingExtra,
        NonFiniteError,
        PlanError,
        RecipeError,
        StrategyError,
    )
    from .pipeline import RECIPES, Checkpoints, Pipeline


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
