"""The ledger: measurements with their conclusions, as table, JSON file, data frame and picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from msgspec import Meta, Struct

from ...common.errors import DrivetrainError, MissingExtra, require
from ...common.pictures import displayed, save_result
from ...common.storage.json_files import ShapeError, convert, finite, parse
from ...common.table import Printed, Table
from . import findings
from .data import Accuracies, LedgerData, Row, Trained
from .picture import picture
from .statistics import LEVEL
from .table import sentences, tables
from .variant import PLAIN, Costs, Kind, Trial, VariantId

V = TypeVar("V")

DERIVED = (
    "rows", "stages", "ceilings", "waiting", "time_breakdown", "extras", "extras_share", "others", "compound", "bound",
    "caveats",
)  # fmt: skip
"""What a file has, but follows from the rounds."""
WRITTEN = ("stopped", "failed", "left_out", "costs", "missing_costs", "notes", "accuracy")


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
    metric: str = "top1"  # of older files


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


def _plain(value: Any) -> Any:
    """Return plain JSON types: variants by display name; infinite numbers, which JSON does not have, as None."""
    if isinstance(value, Row):
        names = ("images_per_s", "ratio", "gain", "note")
        return {"name": value.name, **asdict(value.id), **{one: _plain(getattr(value, one)) for one in names}}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return finite(value)


class Ledger(Printed, LedgerData):
    """The result of `Pipeline.ledger`; see `LedgerData` for the attributes.

    Example::

        >>> ledger = Ledger.load("before.json")
        >>> [str(row.id) for row in ledger.rows]
        ['plain PyTorch', '+ FFCV loader']
    """

    @property
    def bound(self) -> str:
        """One sentence: which of loader, copy and model is the bottleneck, and what to change next."""
        return findings.bound(self)

    @property
    def compound(self) -> str:
        """Whether the speedups multiply; if not, which stages interfere. May be empty."""
        return findings.compound(self)

    @property
    def caveats(self) -> list[str]:
        """What limits the measurements, one sentence each: why measuring stopped, how wide the intervals are, what
        failed, was left out, or is not resolved. Table, picture and JSON contain all of them."""
        return findings.caveats(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the full ledger as plain JSON types, including the raw rounds. An infinite upper end becomes None.
        Variants are keyed by display name; `variants` has their identities."""
        return {
            **{name: _plain(getattr(self, name)) for name in DERIVED}, "level": self.level, **self.facts,
            **{name: _plain(getattr(self, name)) for name in WRITTEN},
            "variants": [{"name": str(one), **asdict(one)} for one in self.variants], "rounds": _plain(self.rounds),
        }  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a ledger that `save` wrote as JSON.

        Raises:
            DrivetrainError: if the file does not exist, or is not a ledger.
        """
        try:
            return cls._parsed(parse(Path(path).read_bytes(), dict[str, Any]))
        except OSError as error:
            raise DrivetrainError(f"{path} could not be read: {error.strerror}.") from None
        except ShapeError as error:
            raise DrivetrainError(
                f"{path} is not a ledger: {error}. Pass a file written by ledger.save('….json')."
            ) from None

    @classmethod
    def _parsed(cls, content: dict[str, Any]) -> Self:
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
            accuracy = Accuracies(trained.epochs, trained.target, identified(trained.rows), trained.metric)
        written = {*DERIVED, *_Measured.__struct_fields__}
        return cls(
            rounds, {name: value for name, value in content.items() if name not in written}, tuple(known.values()),
            found.stopped, identified(found.failed), identified(found.left_out), identified(found.costs),
            found.missing_costs, found.notes, accuracy, found.level,
        )  # fmt: skip

    def to_pandas(self) -> Any:
        """Return a data frame with a row per variant and round: round, variant, images, seconds, waited, images_per_s.

        Raises:
            MissingExtra: if pandas is not installed.
        """
        try:
            pandas = require("pandas", "all", "create a data frame")
        except MissingExtra as error:
            raise MissingExtra("pandas is needed to create a data frame: pip install pandas") from error
        return pandas.DataFrame(
            [
                {"round": number, "variant": str(one), **asdict(trial), "images_per_s": trial.speed}
                for number, trials in enumerate(self.rounds, 1)
                for one, trial in trials.items()
            ]
        ).drop(columns=["samples", "parts"])

    def save(self, path: str | Path) -> None:
        """Write the ledger in the format of the suffix: `.json`, or a picture (`.png`, `.svg`, `.pdf`).

        Raises:
            DataError: for another suffix. DrivetrainError: for a missing folder.
            MissingExtra: for a picture without the extra `plot`.
        """
        save_result(self, path, dpi=150, bbox_inches="tight")

    def show(self) -> Any:
        """Return the picture, which a notebook displays: a matplotlib figure. Raise MissingExtra without matplotlib."""
        return displayed(picture(self))

    def _content(self) -> tuple[list[Table], list[str]]:
        return tables(self), sentences(self)


class LedgerInterrupted(KeyboardInterrupt):
    """Ctrl-C during `Pipeline.ledger`. `ledger` has the results so far; None if they are not a full ledger."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        what = "before plain PyTorch and the full pipeline had one trial each: there are no results"
        if ledger is not None:
            what = f"after {len(ledger.rounds)} round(s), which this exception's ledger contains"
        super().__init__(f"the ledger was interrupted {what}")
        self.ledger = ledger

    def __reduce__(self) -> Any:
        return type(self), (self.ledger,)
