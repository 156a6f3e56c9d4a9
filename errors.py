"""The typed errors of Drivetrain: each names the value, the place and the remedy.

They stand at the root because every folder raises them and no folder may import another's.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


class DrivetrainError(Exception):
    """Base of all errors that Drivetrain raises on purpose."""


class DataError(DrivetrainError, ValueError):
    """A data source, or an argument about it, that cannot be used."""


class BetonError(DataError):
    """A `.beton` file that is missing, unfinished, damaged or inconsistent."""


class PlanError(DrivetrainError, ValueError):
    """A combination of stages that cannot work, found before any work starts."""


class StrategyError(DrivetrainError, RuntimeError):
    """A distribution strategy that is unknown, cannot run here, or lost a rank."""


class RecipeError(DrivetrainError, ValueError):
    """A recipe that is unknown, or has a key or value that means nothing."""


class CheckpointError(DrivetrainError, ValueError):
    """A checkpoint that is missing, incomplete, damaged, of another run, or cannot be written."""


class NonFiniteError(DrivetrainError, ArithmeticError):
    """A loss or a gradient that is no finite number, which would spoil the weights."""


class LedgerError(DrivetrainError, RuntimeError):
    """A ledger that could not be measured: plain PyTorch failed, or the time is too short for the least of one.

    Attributes:
        ledger: what was measured by then, a `pipeline.Ledger`; None if that is not one round.
    """

    def __init__(self, message: str, ledger: Any = None) -> None:
        super().__init__(message)
        self.ledger = ledger


class MissingExtra(DrivetrainError, ImportError):
    """An optional dependency that is not installed; the message names the extra that brings it."""


def suggest(name: str, options: Iterable[str]) -> str:
    """The tail of an "unknown name" message: the nearest option if one is near, then all of them."""
    known = sorted(options)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Known: {', '.join(known)}."


def require_suffix(out: Path, suffix: str, error: type[DrivetrainError]) -> None:
    """Refuses a file to write whose name does not end in `suffix`, so that a slip replaces no file of another kind.

    Raises:
        `error`: with a name that will do.
    """
    if out.suffix != suffix:
        raise error(
            f"{out} does not end in {suffix}, and might be a file of another kind; nothing was written. "
            f"Name the file to write with that suffix, e.g. {out.parent / (out.stem or 'out')}{suffix}."
        )


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional dependency at its point of use.

    Args:
        module: dotted module name, e.g. `"matplotlib.pyplot"`.
        extra: the extra of Drivetrain that installs it, e.g. `"plot"`.
        purpose: what the caller wanted it for, completing "… is needed to …".

    Raises:
        MissingExtra: if it, or something it needs, cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{module.split('.')[0]} is needed to {purpose}, and could not be imported ({error}). "
            f"Install it with: pip install 'drivetrain[{extra}]'"
        ) from error
