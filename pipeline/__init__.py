"""The builder and what drives it: plan, recipes, loop, ledger, command line.

Names are imported at first use: the command line's `--help` needs none of them, and they cost seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "RECIPES": "recipes",
    "Built": "build",
    "CheckpointWarning": "retention",
    "Checkpoints": "retention",
    "Epoch": "history",
    "FitResult": "result",
    "History": "history",
    "Ledger": "ledger_result",
    "LedgerInterrupted": "ledger_result",
    "Logger": "loggers",
    "LoggerWarning": "loggers",
    "Pipeline": "pipeline",
    "Plan": "plan",
    "Step": "plan",
    "TrainingInterrupted": "result",
    "compare": "ledger_compare",
    "evaluate": "loop",
    "export": "exporting",
    "train_epoch": "loop",
}

__all__ = [
    "RECIPES",
    "Built",
    "CheckpointWarning",
    "Checkpoints",
    "Epoch",
    "FitResult",
    "History",
    "Ledger",
    "LedgerInterrupted",
    "Logger",
    "LoggerWarning",
    "Pipeline",
    "Plan",
    "Step",
    "TrainingInterrupted",
    "compare",
    "evaluate",
    "export",
    "train_epoch",
]

if TYPE_CHECKING:
    from .training.build import Built
    from .checkpoints.export import export
    from .telemetry.history import Epoch, History
    from .ledger.comparison import compare
    from .ledger.ledger import Ledger, LedgerInterrupted
    from .telemetry.loggers import Logger, LoggerWarning
    from .training.loop import evaluate, train_epoch
    from .pipeline import Pipeline
    from .spec.plan import Plan, Step
    from .recipes.presets import RECIPES
    from .runs.result import FitResult, TrainingInterrupted
    from .checkpoints.directory import Checkpoints, CheckpointWarning


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
