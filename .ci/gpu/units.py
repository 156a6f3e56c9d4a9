"""What a stage of `run.py` is: units, each a process that leaves a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


class StageError(Exception):
    """A stage cannot run or continue; the message names the file or value, and the remedy."""


@dataclass(frozen=True)
class Unit:
    """One process of a stage.

    Attributes:
        name: unique within its stage.
        command: the arguments; `{out}` is replaced by an empty folder, to which it writes its result.
        read: returns the result, as JSON types, from that folder; raises if there is none.
    """

    name: str
    command: tuple[str, ...]
    read: Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """Units that make up one file of results.

    Attributes:
        name: the file is `gpu-NAME.json`.
        units: in the order in which they run.
        summarize: returns the summary of all units' results, by name.
        environment: additional environment variables of its units.
    """

    name: str
    units: tuple[Unit, ...]
    summarize: Callable[[dict[str, Any]], dict[str, Any]]
    environment: tuple[tuple[str, str], ...] = ()
