"""Write and read a ledger as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from ...common.errors import DrivetrainError
from ...common.storage.json_files import ShapeError, convert, parse
from ..measuring.statistics import LEVEL
from ..measuring.variant import PLAIN, Costs, Kind, Trial, VariantId
from .data import Accuracies, LedgerData, Row, Trained
from .findings import bound, caveats, compound

L = TypeVar("L", bound=LedgerData)
V = TypeVar("V")

DERIVED: dict[str, Callable[[LedgerData], Any]] = {
    "rows": lambda ledger: [_row(row) for row in ledger.rows],
    "stages": lambda ledger: [asdict(stage) for stage in ledger.stages],
    "ceilings": lambda ledger: _named(ledger.ceilings),
    "waiting": lambda ledger: ledger.waiting,
    "time_breakdown": lambda ledger: ledger.time_breakdown,
    "extras": lambda ledger: asdict(ledger.extras) if ledger.extras else None,
    "extras_share": lambda ledger: ledger.extras_share,
    "others": lambda ledger: _named(ledger.others),
    "compound": compound,
    "bound": bound,
    "caveats": caveats,
}
"""What a file has, but follows from the rounds."""


def to_dict(ledger: LedgerData) -> dict[str, Any]:
    """Return the full ledger as plain JSON types, including the raw rounds. An infinite upper end becomes None.

    Variants are keyed by display name; `variants` has their identities.
    """
    accuracy = ledger.accuracy
    return {
        **{name: _finite(derive(ledger)) for name, derive in DERIVED.items()},
        "level": ledger.level,
        **ledger.facts,
        "stopped": ledger.stopped,
        "failed": {str(one): reason for one, reason in ledger.failed.items()},
        "left_out": {str(one): reason for one, reason in ledger.left_out.items()},
        "costs": _named(ledger.costs),
        "missing_costs": dict(ledger.missing_costs),
        "notes": list(ledger.notes),
        "accuracy": None if accuracy is None else {
            "epochs": accuracy.epochs, "target": accuracy.target, "rows": _named(accuracy.rows)
        },
        "variants": [{"name": str(one), **asdict(one)} for one in ledger.variants],
        "rounds": [_named(trials) for trials in ledger.rounds],
    }  # fmt: skip


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


class _Hardware(Struct):
    gpus: list[str]
    processor: str
    cores: int


class _Versions(Struct):
    torch: str | None
    drivetrain: str | None


class _Machine(Struct):
    hardware: _Hardware
    versions: _Versions
    date: str
    command: str
    environment: dict[str, Any] = {}


class _Step(Struct):
    what: str
    why: str


class _Facts(Struct):
    """The facts that are displayed or compared; a ledger may have any others."""

    recipe: str | None = None
    plan: list[_Step] = []
    asked: dict[str, Any] = {}
    provenance: _Machine | None = None


class _Identity(Struct):
    name: str
    kind: Kind
    stage: str


class _Accuracies(Struct):
    epochs: int
    target: float | None
    rows: dict[str, Trained]


class _Measured(Struct):
    """A ledger's file without facts, and without what follows from the rounds."""

    rounds: Annotated[list[dict[str, Trial]], Meta(min_length=1)]
    variants: list[_Identity]
    level: Annotated[float, Meta(gt=0, lt=1)] = LEVEL
    stopped: str = ""
    failed: dict[str, str] = {}
    left_out: dict[str, str] = {}
    costs: dict[str, Costs] = {}
    missing_costs: dict[str, str] = {}
    notes: list[str] = []
    accuracy: _Accuracies | None = None


def read(path: str | Path, kind: type[L]) -> L:
    """Return the ledger in a file as a `kind`; see `Ledger.load`.

    Raises:
        DrivetrainError: if the file does not exist, or is not a ledger.
    """
    try:
        return _parsed(parse(Path(path).read_bytes(), dict[str, Any]), kind)
    except OSError as error:
        raise DrivetrainError(f"{path} could not be read: {error.strerror}.") from None
    except ShapeError as error:
        raise DrivetrainError(
            f"{path} is not a ledger: {error}. Pass a file written by ledger.save('….json')."
        ) from None


def _parsed(content: dict[str, Any], kind: type[L]) -> L:
    if "rounds" in content and "variants" not in content:
        raise ShapeError("it has no 'variants': an earlier version of Drivetrain wrote it; measure again")
    found = convert(content, _Measured)
    convert(content, _Facts)
    known = {one.name: VariantId(one.kind, one.stage) for one in found.variants}

    def identified(table: Mapping[str, V]) -> dict[VariantId, V]:
        if odd := table.keys() - known.keys():
            raise ShapeError(f"{min(odd)!r} is not among its variants")
        return {one: table[name] for name, one in known.items() if name in table}

    for name, one in known.items():
        if name != str(one):
            raise ShapeError(f"its variant {str(one)!r} is named {name!r}")
    rounds = [identified(trials) for trials in found.rounds]
    for trials in rounds:
        if PLAIN not in trials or trials.keys() != rounds[0].keys():
            raise ShapeError(f"its rounds do not all have the same variants, {str(PLAIN)!r} among them")
    accuracy = None
    if (trained := found.accuracy) is not None:
        accuracy = Accuracies(trained.epochs, trained.target, identified(trained.rows))
    written = {*DERIVED, *_Measured.__struct_fields__}
    return kind(
        rounds,
        {name: value for name, value in content.items() if name not in written},
        tuple(known.values()),
        found.stopped,
        identified(found.failed),
        identified(found.left_out),
        identified(found.costs),
        found.missing_costs,
        found.notes,
        accuracy,
        found.level,
    )
