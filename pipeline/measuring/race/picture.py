"""The picture of a race: accuracy over seconds of training."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from ....common.errors import require
from ....common.pictures import GRID, INK, PALETTE, literal, unit_of_time
from ...ledger.picture import machine_text

ABOUT = "Points: the evaluations of all runs. Lines: medians over seeds. Strokes at the target: median seconds to it."
MARKERS = "osD^v"  # the second half dozen of variants has other marks


def figure_of(race: Any) -> Any:
    """Return the picture of a `RaceResult`, which imports this file, as a matplotlib figure."""
    figure = require("matplotlib.figure", "plot", "draw the race").Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.subplots()
    longest = max(point.seconds for run in race.runs for point in run.points)
    unit, scale = unit_of_time(longest)
    lines, labels = list[Any](), list[str]()  # a label of a line could not begin with "_"
    for number, row in enumerate(race.rows):
        runs = race.of(row.variant)
        color, marker = PALETTE[number % len(PALETTE)], MARKERS[number // len(PALETTE) % len(MARKERS)]
        points = [point for run in runs for point in run.points]
        axes.plot(
            [point.seconds / scale for point in points], [point.accuracy for point in points], marker,
            color=color, alpha=0.45, markersize=4, markeredgewidth=0,
        )  # fmt: skip
        line = medians(runs)
        lines += axes.plot([at / scale for at, _ in line], [each for _, each in line], color=color, linewidth=1.6)
        labels.append(literal(f"{row.variant}: {row.reached} of {row.runs} reached it"))
        if row.seconds is not None:
            axes.plot([row.seconds.value / scale], [race.target], "|", color=color, markersize=16, markeredgewidth=2)
    axes.axhline(race.target, color=INK, linestyle="--", linewidth=0.8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} of training, without evaluations")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    title = f"{race.monitor} in validation; the target is {race.target:.2%}"
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.legend(lines, labels, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    where = machine_text(race.facts) if race.facts.get("hardware") else ""
    below = [line for one in (ABOUT, race.rule, where) for line in textwrap.wrap(one, 124)]
    figure.text(0.01, -0.01, "\n".join(below), ha="left", va="top", fontsize=8, color=INK)
    return figure


def medians(runs: Sequence[Any]) -> list[tuple[float, float]]:
    """Return the medians of seconds and accuracy at each evaluation, as far as more than half of the runs came."""
    found = []
    for each in zip_longest(*(run.points for run in runs)):
        points: list[Any] = [point for point in each if point is not None]
        if 2 * len(points) > len(runs):
            found.append((median(p.seconds for p in points), median(p.accuracy for p in points)))
    return found
