"""The exceptions of Drivetrain. Each message names the value, its location and the remedy."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class DrivetrainError(Exception):
    """Base class of all errors that Drivetrain raises deliberately."""


class DataError(DrivetrainError, ValueError):
    """An unusable data source, or an invalid argument about one."""


class BetonError(DataError):
    """A `.beton` file that is missing, incomplete, damaged or inconsistent."""


class PlanError(DrivetrainError, ValueError):
    """An invalid option or combination of stages, found before any work starts."""


class StrategyError(DrivetrainError, RuntimeError):
    """A distribution strategy that is unknown, cannot run here, or lost a rank."""


class RecipeError(DrivetrainError, ValueError):
    """An unknown recipe, or a recipe with an invalid key or value."""


class CheckpointError(DrivetrainError, ValueError):
    """A checkpoint that is missing, incomplete, damaged, from another run, or cannot be written."""


class ExportError(DrivetrainError, RuntimeError):
    """A model that cannot be exported, or whose exported form computes something else."""


class NonFiniteError(DrivetrainError, ArithmeticError):
    """A non-finite loss or gradient, which would corrupt the weights."""


class LedgerError(DrivetrainError, RuntimeError):
    """A ledger that could not be measured: plain PyTorch failed, or the time budget is too short.

    `ledger` has the complete rounds, as a `pipeline.Ledger`; None if there are none.
    """

    def __init__(self, message: str, ledger: Any = None) -> None:
        super().__init__(message)
        self.ledger = ledger


class MissingExtra(DrivetrainError, ImportError):
    """An optional dependency that is not installed; the message names the extra that installs it."""


def suggest(name: str, options: Iterable[str]) -> str:
    """Return the end of an "unknown name" message: the closest option, then all, or of many the most similar."""
    known = sorted(options)
    near = difflib.get_close_matches(name.lower(), known, n=5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if len(known) <= (40 if near else 100):
        return f"{hint} Known: {', '.join(known)}."
    similar = f" Similar: {', '.join(near[1:])}." if near[1:] else ""
    return f"{hint}{similar} {len(known):,} names are known."


def first_of(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def require_suffix(out: Path, suffix: str, error: type[DrivetrainError]) -> None:
    """Raise `error` unless `out` ends in `suffix`, so that a typo cannot overwrite a file of another kind."""
    if out.suffix != suffix:
        raise error(
            f"{out} does not end in {suffix} and might be a file of another kind; nothing was written. "
            f"Pass a name with that suffix, e.g. {out.parent / (out.stem or 'out')}{suffix}."
        )


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, of the extra `extra`; `purpose` completes "… is needed to …" in the message."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{module.split('.')[0]} is needed to {purpose}, and could not be imported ({error}). "
            f"Install it with: pip install 'drivetrain[{extra}]'"
        ) from error
