"""A ledger as JSON, written and read: what is not a ledger, or not one any more, is refused, not shown as figures."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ...checks import is_number, is_whole
from ...errors import DrivetrainError
from .data import LedgerData
from .findings import bound, caveats, compound
from .picture import caption
from .rounds import PLAIN, Turn
from .statistics import LEVEL
from .table import text

L = TypeVar("L", bound=LedgerData)

DERIVED = (
    "rows", "stages", "ceilings", "waiting", "split", "extras", "extras_share", "compound", "bound", "caveats",
)  # fmt: skip
"""What `Ledger.to_dict` computes from the rounds; it is not a fact of its own."""
TABLES = ("asked", "costs", "failed", "left_out", "provenance")
"""The facts that have names and values."""


def to_dict(ledger: LedgerData) -> dict[str, Any]:
    """All of it as plain JSON types, the raw rounds included. An interval without an upper end ends in None."""
    found = {
        "rows": [asdict(row) for row in ledger.rows],
        "stages": [asdict(stage) for stage in ledger.stages],
        "ceilings": {name: asdict(one) for name, one in ledger.ceilings.items()},
        "waiting": ledger.waiting,
        "split": ledger.split,
        "extras": asdict(ledger.extras) if ledger.extras else None,
        "extras_share": ledger.extras_share,
        "compound": compound(ledger),
        "bound": bound(ledger),
        "caveats": caveats(ledger),
        "level": ledger.level,
    }
    return {
        **{name: _finite(value) for name, value in found.items()},
        **ledger.facts,
        "rounds": [{name: asdict(turn) for name, turn in turns.items()} for turns in ledger.rounds],
    }


def _finite(value: Any) -> Any:
    """The value with None for an infinite number, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: str | Path, kind: type[L]) -> L:
    """The ledger in a file, as a value of its class; see `Ledger.load`.

    Raises:
        DrivetrainError: if the file is not there, or is no ledger.
    """
    try:
        found = json.loads(Path(path).read_text())
        rounds = [{name: Turn(**turn) for name, turn in turns.items()} for turns in found.pop("rounds")]
        _check_rounds(rounds)
        ledger = kind(rounds, found, found.pop("level", LEVEL))
        for name in DERIVED:
            found.pop(name, None)
        found.pop("pairs", None)  # of ledgers before they were dropped
        _check_facts(ledger)
        to_dict(ledger)  # whatever else is missing is missed here
        text(ledger)
        caption(ledger)
    except OSError as error:
        raise DrivetrainError(f"{path} could not be read: {error.strerror}.") from None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise DrivetrainError(
            f"{path} is no ledger ({type(error).__name__}: {error}). Give a file that ledger.save('….json') wrote."
        ) from None
    return ledger


def _check_rounds(rounds: list[dict[str, Turn]]) -> None:
    """Raises ValueError for turns that could not have been measured: no figure can be made of them."""
    if next(iter(rounds[0])) != PLAIN:  # a tool that sorts the names would make another variant the whole
        raise ValueError(f"{PLAIN!r} is not the first of a round: the order of the variants is lost")
    for number, turns in enumerate(rounds, 1):
        if turns.keys() != rounds[0].keys():
            odd = sorted(turns.keys() ^ rounds[0].keys())
            raise ValueError(f"{odd[0]!r} is not in each of the rounds")
        for name, turn in turns.items():
            figures = (turn.images, turn.seconds, turn.waited)
            if not all(isinstance(figure, float) or is_whole(figure) for figure in figures):
                raise ValueError(f"round {number} of {name!r} has a figure that is no number")
            if not (turn.images > 0 and turn.seconds > 0 and 0 < turn.speed < math.inf):
                raise ValueError(
                    f"round {number} of {name!r} has {turn.images} images in {turn.seconds} seconds"
                )
            if not 0 <= turn.waited <= turn.seconds * (1 + 1e-9):  # a sum's last bit may lie beyond the whole
                raise ValueError(f"round {number} of {name!r} waited {turn.waited} of {turn.seconds} seconds")


def _check_facts(ledger: LedgerData) -> None:
    """Raises ValueError for facts that cannot be shown or compared; which ones there are is free."""
    if not is_number(ledger.level, "(0, 1)"):
        raise ValueError(f"level={ledger.level!r} is not between 0 and 1")
    facts: dict[str, Any] = ledger.facts
    machine = facts.get("provenance") or {}
    tables = [(name, facts.get(name) or {}) for name in TABLES]
    tables += [(name, machine.get(name) or {}) for name in ("hardware", "environment", "versions")]
    for name, value in tables:
        if not isinstance(value, dict):
            raise ValueError(f"{name!r} is no table of names and values")
    for name in ("failed", "left_out"):
        if not all(isinstance(reason, str) for reason in (facts.get(name) or {}).values()):
            raise ValueError(f"{name!r} has a reason that is not a text")
    for name in ("in_turn", "notes"):
        value = facts.get(name) or []
        if not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise ValueError(f"{name!r} is not a list of texts")
    rows = facts.get("in_turn")
    if rows is not None and rows[:1] != [PLAIN]:
        raise ValueError(f"'in_turn' does not begin with {PLAIN!r}")
    if not all(isinstance(step, dict) and {"what", "why"} <= step.keys() for step in facts.get("plan") or []):
        raise ValueError("'plan' has a step without 'what' or 'why'")
