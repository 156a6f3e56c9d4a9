"""The plot of a run: loss, monitored metric, learning rate and throughput over its epochs."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from ...common.errors import require
from ...common.pictures import BLUE, GRID, INK, PALE, RED, drawn, literal
from ..tasks.metrics import format_metric

TRAIN, VAL = BLUE, RED
FLATTENS = 10.0  # an outlier: so many times farther from the median than the other values' spread


def draw(history: Any) -> bytes:
    return drawn(figure_of(history), dpi=120)


def figure_of(history: Any) -> Any:
    """Return the plot of a `History`, whose file imports this one, as a matplotlib figure. Raise MissingExtra without
    matplotlib."""
    figure = require("matplotlib.figure", "plot", "draw the curves of a training").Figure(figsize=(9, 5.6))
    ticker = require("matplotlib.ticker", "plot", "draw the curves of a training")
    # The layout and the titles' heights are set by hand: finding them takes matplotlib longer than the drawing.
    figure.subplots_adjust(left=0.08, right=0.985, bottom=0.085, top=0.89, hspace=0.18, wspace=0.2)
    epochs, monitor = history.epochs, history.monitor
    (losses, metric), (rate, speed) = figure.subplots(2, 2, sharex=True)
    if steps := [step for step in history.steps if math.isfinite(step.loss)]:
        at = [step.at for step in steps]
        losses.plot(at, [step.loss for step in steps], color=PALE, linewidth=0.8, label="steps", zorder=1)
        rate.plot(at, [step.lr for step in steps], color=PALE, linewidth=1.6, zorder=1)
    _curve(losses, epochs, [epoch.loss for epoch in epochs], TRAIN, "training (its own loss function)")
    _curve(losses, epochs, [epoch.val_loss for epoch in epochs], VAL, "validation (the task's own)")
    losses.legend(frameon=False, fontsize=8)
    values = [monitor.of(epoch) for epoch in epochs]
    if monitor.unit == "fraction":
        values = [None if value is None else 100 * value for value in values]
    _curve(metric, epochs, values, VAL, monitor.name)
    _name_the_best(metric, history)
    _curve(rate, epochs, [epoch.lr for epoch in epochs], TRAIN, "lr")
    _curve(speed, epochs, [epoch.images_per_s for epoch in epochs], TRAIN, "images/s")
    speed.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    titles = (
        "loss, mean of the epoch", f"{monitor} in validation{', %' * (monitor.unit is not None)}",
        "learning rate, dots at the epoch's end", "training throughput, images/s",
    )  # fmt: skip
    for axes, title in zip((losses, metric, rate, speed), titles, strict=True):
        axes.set_title(literal(title), loc="left", y=1.0, fontsize=10, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
        axes.margins(y=0.12)
    for axes in (losses, metric):
        _leave_outliers_above(axes)
    for axes in (rate, speed):
        highest = max(max(line.get_ydata(), default=0) for line in axes.lines)
        axes.set_ylim(0, 1.12 * highest or 1)  # at a rate of 0 both ends would be 0
        axes.set_xlabel("epoch")
    figure.suptitle(literal(_title(history)), x=0.01, y=0.985, ha="left", va="top", fontsize=11, color=INK)
    return figure


def _curve(axes: Any, epochs: Sequence[Any], values: list[float | None], color: str, label: str) -> None:
    """Plot a line with a dot per epoch, without which a single epoch would be invisible; None makes a gap."""
    if any(value is not None for value in values):
        numbers = [epoch.epoch for epoch in epochs]
        known = [float("nan") if value is None else value for value in values]
        axes.plot(numbers, known, color=color, marker="o", markersize=3, linewidth=1.6, label=label)
    else:
        axes.plot([], [])


def _leave_outliers_above(axes: Any) -> None:
    """Let values far above all others, such as the loss of a failed evaluation, leave the plot, where an arrow tells
    that of an epoch: they would flatten everything else."""
    lines = [(line, [(x, y) for x, y in zip(*line.get_data(), strict=True) if math.isfinite(y)]) for line in axes.lines]
    values = sorted(y for _, points in lines for _, y in points)
    if len(values) < 4:
        return
    middle, spread = median(values), values[3 * len(values) // 4] - values[len(values) // 4]
    kept = [y for y in values if y <= middle + FLATTENS * max(spread, 1e-9 * abs(middle))]
    if not 0 < len(values) - len(kept) <= len(values) // 4:
        return
    room = 0.12 * (max(kept) - min(kept)) or 0.12 * abs(max(kept)) or 1
    top = max(kept) + room
    axes.set_ylim(min(kept) - room, top)
    for x, y in [point for line, points in lines if line.get_marker() == "o" for point in points]:
        if y > top:
            style = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": INK}
            axes.annotate(f"{y:.3g} ↑", (x, top), (0, -10), **style)


def _name_the_best(axes: Any, history: Any) -> None:
    monitor, best = history.monitor, history.best
    if best is None:
        axes.text(0.5, 0.5, "no validation data", transform=axes.transAxes, ha="center", color=INK)
        axes.set_yticks([])
        return
    text = format_metric(monitor.of(best) or 0.0, monitor.unit)
    axes.text(
        1.0, 1.02, f"best {text}, epoch {best.epoch}", transform=axes.transAxes, ha="right", va="bottom",
        fontsize=9, color=VAL,
    )  # fmt: skip


def _title(history: Any) -> str:
    machine = history.facts.get("provenance", {})
    hardware = machine.get("hardware", {})
    where = ", ".join(hardware.get("gpus", [])) or hardware.get("processor", "")
    parts = [history.facts.get("recipe") or "training", where, str(machine.get("date", ""))[:10]]
    return "  ·  ".join(part for part in parts if part)
