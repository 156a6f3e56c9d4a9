"""Compare two ledgers: what became faster or slower, and what else differs between the runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.table import Printed, Table
from .ledger import Ledger
from .statistics import Ratio, ratio_of_means
from .variant import EXTRAS, SPLIT, VariantId


@dataclass(frozen=True)
class Compared:
    id: VariantId
    first: Ratio | None  # over plain PyTorch in each ledger; None if it is not a row
    second: Ratio | None
    speed: Ratio  # images/s in the second ledger over those in the first

    @property
    def name(self) -> str:
        return str(self.id)

    @property
    def overlap(self) -> bool | None:
        """Whether the intervals of the two ratios over plain PyTorch overlap; None: unknown."""
        if self.first is None or self.second is None or not (self.first.resolved and self.second.resolved):
            return None
        return self.first.low <= self.second.high and self.second.low <= self.first.high


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    names: tuple[str, str]  # of the files
    rows: list[Compared]
    missing: dict[VariantId, str]  # variants that only one has, with the name of that ledger
    differences: list[str]  # in recipe, hardware, versions and revision, one sentence each
    failed: list[str] = field(default_factory=list)  # variants and unresolved ratios, one sentence each

    def _content(self) -> tuple[list[Table], list[str]]:
        return [self._table()], self._sentences()

    def _table(self) -> Table:
        words = {True: "yes", False: "no", None: ""}
        rows = []
        for row in self.rows:
            first, second = (one.text if one else "" for one in (row.first, row.second))
            rows.append((row.name, first, second, words[row.overlap], row.speed.text))
        return Table(
            ("", "over plain: first", "over plain: second", "overlap", "speed: second over first"),
            rows,
            "Two ledgers",
            "intervals in brackets; the runs were not interleaved: the machine's speed may have changed in between",
            figures=True,
        )

    def _sentences(self) -> list[str]:
        sentences = [f"first: {self.names[0]}; second: {self.names[1]}.", *self.failed]
        sentences += [f"Only in {where}: {one}." for one, where in self.missing.items()]
        return sentences + (self.differences or ["Recipe, hardware, versions and revision are the same."])


def compare(first: str | Path, second: str | Path) -> Comparison:
    """Compare two ledgers saved as JSON.

    Raises:
        DrivetrainError: if one is not a ledger.

    Example::

        >>> comparison = compare("before.json", "after.json")
        >>> [str(row.id) for row in comparison.rows]
        ['plain PyTorch', '+ FFCV loader', 'loader alone', 'model alone']
    """
    names = str(first), str(second)
    ledgers = Ledger.load(first), Ledger.load(second)
    speeds = [_speeds(ledger) for ledger in ledgers]
    ratios = [{row.id: row.ratio for row in ledger.rows} for ledger in ledgers]
    rows = [
        Compared(
            one, ratios[0].get(one), ratios[1].get(one),
            ratio_of_means(speeds[1][one], speeds[0][one], ledgers[0].level),
        )
        for one in speeds[0] if one in speeds[1] and one not in (SPLIT, EXTRAS)  # not separate variants
    ]  # fmt: skip
    missing = {one: names[0] for one in speeds[0] if one not in speeds[1]}
    missing |= {one: names[1] for one in speeds[1] if one not in speeds[0]}
    failed = [
        f"{file}: {one} {str(why).rstrip('.')}."
        for file, ledger in zip(names, ledgers, strict=True)
        for one in ledger.variants
        if (why := ledger.why_not(one))
    ]
    if any(not one.resolved for row in rows for one in (row.first, row.second, row.speed) if one is not None):
        failed.append("Not resolved: the interval extends beyond a factor of two to each side. Measure longer.")
    return Comparison(names, rows, missing, differences(*(ledger.facts for ledger in ledgers)), failed)


def _speeds(ledger: Ledger) -> dict[VariantId, list[float]]:
    return {one: [trials[one].speed for trials in ledger.rounds] for one in ledger.rounds[0]}


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    sentences = []
    pairs = {"recipe": (first.get("recipe"), second.get("recipe"))}
    plans = first.get("plan") or [], second.get("plan") or []
    for name, plan, other in (("first", *plans), ("second", *reversed(plans))):
        if own := _own_steps(plan, other):
            sentences.append(f"Only the {name}'s plan has: {own}.")
    machines = first.get("provenance") or {}, second.get("provenance") or {}
    pairs["revision"] = (machines[0].get("git_revision"), machines[1].get("git_revision"))
    for part in ("hardware", "environment", "versions"):
        one, two = machines[0].get(part) or {}, machines[1].get(part) or {}
        pairs |= {f"{part}, {key}": (one.get(key), two.get(key)) for key in [*one, *(k for k in two if k not in one)]}
    for name, (one, two) in pairs.items():
        if one != two:
            sentences.append(f"Different {name}: {_text(one)} and {_text(two)}.")
    return sentences


def _own_steps(plan: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    known = [step["what"] for step in other]
    return "; ".join(
        f"{step['what']} ({step['why']})" if step["what"] in known else step["what"]
        for step in plan
        if step not in other
    )


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
