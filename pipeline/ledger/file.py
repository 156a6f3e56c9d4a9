"""Write and read a ledger as JSON. Files that no measurement could have produced are rejected."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ...common.checks import is_number, is_whole
from ...common.errors import DrivetrainError
from ..measuring.statistics import LEVEL
from .data import NAMES, PLAIN, Accuracies, Costs, LedgerData, Row, Trained, Trial, VariantId
from .findings import bound, caveats, compound
from .picture import caption
from .table import text

L = TypeVar("L", bound=LedgerData)
V = TypeVar("V")

DERIVED = (
    "rows", "stages", "ceilings", "waiting", "time_breakdown", "extras", "extras_share", "others", "compound", "bound",
    "caveats",
)  # fmt: skip
"""What `Ledger.to_dict` computes from the rounds."""


def to_dict(ledger: LedgerData) -> dict[str, Any]:
    """Return the full ledger as plain JSON types, including the raw rounds. An infinite upper end becomes None.

    Variants are keyed by display name; `variants` has their identities.
    """
    derived = {
        "rows": [_row(row) for row in ledger.rows],
        "stages": [asdict(stage) for stage in ledger.stages],
        "ceilings": _named(ledger.ceilings),
        "waiting": ledger.waiting,
        "time_breakdown": ledger.time_breakdown,
        "extras": asdict(ledger.extras) if ledger.extras else None,
        "extras_share": ledger.extras_share,
        "others": _named(ledger.others),
        "compound": compound(ledger),
        "bound": bound(ledger),
        "caveats": caveats(ledger),
        "level": ledger.level,
    }
    return {
        **{name: _finite(value) for name, value in derived.items()},
        **ledger.facts,
        "stopped": ledger.stopped,
        "failed": {str(one): reason for one, reason in ledger.failed.items()},
        "left_out": {str(one): reason for one, reason in ledger.left_out.items()},
        "costs": _named(ledger.costs),
        "missing_costs": dict(ledger.missing_costs),
        "notes": list(ledger.notes),
        "accuracy": None
        if ledger.accuracy is None
        else {
            "epochs": ledger.accuracy.epochs,
            "target": ledger.accuracy.target,
            "rows": _named(ledger.accuracy.rows),
        },
        "variants": [{"name": str(one), **asdict(one)} for one in ledger.variants],
        "rounds": [_named(trials) for trials in ledger.rounds],
    }


def _row(row: Row) -> dict[str, Any]:
    figures = {"images_per_s": row.images_per_s, "ratio": row.ratio, "gain": row.gain}
    values = {name: None if one is None else asdict(one) for name, one in figures.items()}
    return {"name": row.name, **asdict(row.id), **values, "note": row.note}


def _named(table: Mapping[VariantId, Any]) -> dict[str, Any]:
    return {str(one): asdict(value) for one, value in table.items()}


def _finite(value: Any) -> Any:
    """Replace infinite numbers, which JSON does not have, with None."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: str | Path, kind: type[L]) -> L:
    """Return the ledger in a file as a `kind`; see `Ledger.load`.

    Raises:
        DrivetrainError: if the file does not exist, or is not a ledger.
    """
    try:
        ledger = _parsed(json.loads(Path(path).read_text()), kind)
        to_dict(ledger)  # these raise if anything else is missing
        text(ledger)
        caption(ledger)
    except OSError as error:
        raise DrivetrainError(f"{path} could not be read: {error.strerror}.") from None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise DrivetrainError(
            f"{path} is not a ledger ({type(error).__name__}: {error}). Pass a file written by ledger.save('….json')."
        ) from None
    return ledger


def _parsed(content: dict[str, Any], kind: type[L]) -> L:
    rounds = [{name: Trial(**trial) for name, trial in trials.items()} for trials in content.pop("rounds")]
    if "variants" not in content:
        raise ValueError("it has no 'variants': an earlier version of Drivetrain wrote it; measure again")
    known = _identities(content.pop("variants"))
    _check_rounds(rounds)
    for name in DERIVED:
        content.pop(name, None)

    def table(name: str, value: Any) -> dict[VariantId, Any]:
        return {_known(known, key): one for key, one in _table(name, value).items()}

    def reasons(name: str) -> dict[VariantId, str]:
        texts = table(name, content.pop(name, None))
        if not all(isinstance(reason, str) for reason in texts.values()):
            raise ValueError(f"{name!r} has a reason that is not text")
        return texts

    notes = content.pop("notes", None) or []
    if not (isinstance(notes, list) and all(isinstance(one, str) for one in notes)):
        raise ValueError("'notes' is not a list of strings")
    level = content.pop("level", LEVEL)
    if not is_number(level, "(0, 1)"):
        raise ValueError(f"level={level!r} is not between 0 and 1")
    accuracy = content.pop("accuracy", None)
    if accuracy is not None:
        epochs, target = accuracy["epochs"], accuracy["target"]
        rows = {one: Trained(**row) for one, row in table("accuracy", accuracy["rows"]).items()}
        accuracy = Accuracies(epochs, target, rows)
    fields: dict[str, Any] = {
        "stopped": content.pop("stopped", ""),
        "failed": reasons("failed"),
        "left_out": reasons("left_out"),
        "costs": {
            one: Costs(peak_bytes=cost["peak_bytes"], **{k: v for k, v in cost.items() if k != "peak_bytes"})
            for one, cost in table("costs", content.pop("costs", None)).items()
        },
        "missing_costs": _table("missing_costs", content.pop("missing_costs", None)),
    }
    _check_facts(content)
    return kind(
        [{_known(known, name): trial for name, trial in trials.items()} for trials in rounds],
        content, tuple(known.values()), notes=notes, accuracy=accuracy, level=level, **fields,
    )  # fmt: skip


def _identities(entries: Any) -> dict[str, VariantId]:
    """Return the variants by name.

    Raises:
        ValueError: for an unknown identity or a wrong name, or if plain PyTorch is not the first.
    """
    if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        raise ValueError("'variants' is not a list of identities")
    identities: dict[str, VariantId] = {}
    for entry in entries:
        kind, stage = entry["kind"], entry["stage"]
        if kind not in NAMES or not isinstance(stage, str) or bool(stage) != ("{}" in NAMES[kind]):
            raise ValueError(f"there is no variant of kind {kind!r} with stage {stage!r}")
        one = VariantId(kind, stage)
        if entry["name"] != str(one):
            raise ValueError(f"the variant {str(one)!r} is named {entry['name']!r}")
        identities[str(one)] = one
    if next(iter(identities.values()), None) != PLAIN:
        raise ValueError(f"'variants' does not begin with {str(PLAIN)!r}")
    return identities


def _known(known: dict[str, VariantId], name: str) -> VariantId:
    if name not in known:
        raise ValueError(f"{name!r} is not among the variants")
    return known[name]


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise ValueError(f"{name!r} is not a table of names and values")
    return value or {}


def _check_rounds(rounds: list[dict[str, Trial]]) -> None:
    """Raise ValueError for trials that no measurement could have produced."""
    # A tool that sorts keys would change the order of the variants.
    if next(iter(rounds[0])) != str(PLAIN):
        raise ValueError(f"{str(PLAIN)!r} is not the first of a round: the order of the variants is lost")
    for number, trials in enumerate(rounds, 1):
        if trials.keys() != rounds[0].keys():
            odd = sorted(trials.keys() ^ rounds[0].keys())
            raise ValueError(f"{odd[0]!r} is not in all rounds")
        for name, trial in trials.items():
            figures = (trial.images, trial.seconds, trial.waited)
            if not all(isinstance(figure, float) or is_whole(figure) for figure in figures):
                raise ValueError(f"round {number} of {name!r} has a value that is not a number")
            if not (trial.images > 0 and trial.seconds > 0 and 0 < trial.speed < math.inf):
                raise ValueError(
                    f"round {number} of {name!r} has {trial.images} images in {trial.seconds} seconds"
                )
            if not 0 <= trial.waited <= trial.seconds * (1 + 1e-9):  # up to rounding
                raise ValueError(
                    f"round {number} of {name!r} waited {trial.waited} of {trial.seconds} seconds"
                )


def _check_facts(facts: dict[str, Any]) -> None:
    """Raise ValueError for facts that cannot be displayed or compared. All facts are optional."""
    _table("asked", facts.get("asked"))
    machine = _table("provenance", facts.get("provenance"))
    for name in ("hardware", "environment", "versions"):
        _table(name, machine.get(name))
    if not all(isinstance(step, dict) and {"what", "why"} <= step.keys() for step in facts.get("plan") or []):
        raise ValueError("'plan' has a step without 'what' or 'why'")
