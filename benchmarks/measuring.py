"""Shared by the benchmarks: interleaved measurements of contenders, ratios round by round, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from drivetrain.common.table import Table
from drivetrain.pipeline.telemetry.provenance import provenance

Contender = Callable[[], float]
"""Does its work once, and returns the result: images/s, or seconds."""


def measure(contenders: Mapping[str, Contender], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Run all contenders in each round, and return their results by round. The first `warm_up` rounds do not count.

    Every second round runs in reverse order, so that no contender always follows the same one.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            figure = contenders[name]()
            if number >= warm_up:
                figures[name].append(figure)
    return figures


def summarize(values: list[float]) -> dict[str, Any]:
    """Return median, quartiles, number, and the values themselves."""
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "low": low, "high": high, "n": len(values), "values": values}


def compare(title: str, unit: str, figures: dict[str, list[float]], ours: str) -> tuple[Table, dict[str, Any]]:
    """Return table and JSON of the figures, and of the ratios of `ours` to each contender, paired by round.

    A ratio above 1 is in our favor: for images/s it is ours over theirs, for seconds theirs over ours.
    """
    rows: dict[str, Any] = {}
    cells = []
    digits = {"s": 3, "steps/s": 2}.get(unit, 0)
    for name, values in figures.items():
        pairs = list(zip(figures[ours], values, strict=True))
        own = summarize(values)
        ratio = summarize([b / a if unit == "s" else a / b for a, b in pairs])
        rows[name] = {unit: own, "ours_is_times_as_fast": ratio}
        cells.append((
            name, f"{own['median']:,.{digits}f}", f"{own['low']:,.{digits}f} to {own['high']:,.{digits}f}",
            f"{ratio['median']:.2f}  ({ratio['low']:.2f} to {ratio['high']:.2f})",
        ))  # fmt: skip
    return Table((title, unit, "quartiles", f"{ours} is … times as fast"), cells), rows


def save(tables: list[Table], results: dict[str, Any], path: Path) -> None:
    """Print the tables, and write the results with their provenance."""
    for table in tables:
        print(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**results, "provenance": provenance()}, indent=1))
    print(path)
