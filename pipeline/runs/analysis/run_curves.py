"""The curves of several runs: monitored metric and training loss, by epoch and by time."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ....common.errors import DataError, require
from ....common.pictures import GRID, INK, PALETTE, literal, unit_of_time

COLORS = (*PALETTE, INK)
"""Okabe and Ito's, which people with any color vision tell apart; without yellow, which is pale on white."""
LINES = ("-", "--", ":", "-.")
NAMED = 28
"""Runs that colors and lines tell apart, and that the legend names."""


def figure_of(comparison: Any) -> Any:
    """Return a matplotlib figure of a `RunComparison`, whose file imports this one."""
    runs = [run for run in comparison.runs if run.epochs]
    if not runs:
        raise DataError("No run has a finished epoch, so there are no curves.")
    figure_class = require("matplotlib.figure", "plot", "draw the curves of runs").Figure
    integers = require("matplotlib.ticker", "plot", "draw the curves of runs").MaxNLocator
    names = min(len(runs), NAMED)
    columns = 2 if max(len(run.name) for run in runs[:NAMED]) > 30 else 4
    figure = figure_class(figsize=(10, 6.2 + 0.2 * -(-names // columns)), layout="constrained")
    panels = figure.subplots(2, 2, sharey="row", sharex="col")
    longest, lines = max(run.seconds for run in runs), list[Any]()
    unit, scale = unit_of_time(longest)
    for number, run in enumerate(runs):
        epochs, monitor = run.history.epochs, run.monitor
        style = {
            "color": COLORS[number % len(COLORS)], "linestyle": LINES[number // len(COLORS) % len(LINES)],
            "marker": "o", "markersize": 3 if len(epochs) < 40 else 0, "linewidth": 1.5,
        }  # fmt: skip
        times = [seconds / scale for seconds in accumulate(epoch.seconds for epoch in epochs)]
        percent = 100 if monitor.unit == "fraction" else 1
        rated = [
            (epoch.epoch, time, percent * value)
            for epoch, time in zip(epochs, times, strict=True)
            if (value := monitor.of(epoch)) is not None
        ]
        for panel, at in zip(panels[0], (0, 1), strict=True):
            panel.plot([each[at] for each in rated], [each[2] for each in rated], **style)
        lines += panels[1, 0].plot([epoch.epoch for epoch in epochs], [epoch.loss for epoch in epochs], **style)
        panels[1, 1].plot(times, [epoch.loss for epoch in epochs], **style)
    monitors = dict.fromkeys(f"{run.monitor}{', %' * (run.monitor.unit is not None)}" for run in runs)
    for panel, title in zip(panels[:, 0], (f"{' / '.join(monitors)} in validation", "training loss"), strict=True):
        panel.set_title(title, loc="left", fontsize=10, color=INK)
        panel.xaxis.set_major_locator(integers(integer=True, min_n_ticks=1))
    panels[1, 0].set_xlabel("epoch")
    panels[1, 1].set_xlabel(f"{unit} of training and evaluation")
    for panel in panels.ravel():
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color=GRID, linewidth=0.8)
        panel.tick_params(labelsize=8)
    heading = f"the first {NAMED} of {len(runs)} runs" if len(runs) > NAMED else None
    named = lines[:NAMED], [literal(run.name) for run in runs[:NAMED]]  # labels of lines could not begin with "_"
    figure.legend(*named, loc="outside lower left", ncols=columns, frameon=False, fontsize=8, title=heading)
    return figure
