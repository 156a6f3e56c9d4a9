"""The ledger's picture: a bar of throughput per row, and the two ceilings as lines."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from ..errors import require
from .ledger_result import LOADER, MODEL, PLAIN, Ledger, Row

INK, BAR, PALE = "#222222", "#2f6f9f", "#b8c4cc"


def draw(ledger: Ledger, form: str) -> bytes:
    """The picture in the given format (`"png"`, `"svg"`, `"pdf"`).

    Raises:
        MissingExtra: without matplotlib.
    """
    figure_class = require("matplotlib.figure", "plot", "draw the ledger").Figure
    rows = ledger.rows
    figure = figure_class(figsize=(8, 2.0 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    speeds = [row.images_per_s for row in rows]
    axes.barh(
        places,
        [speed.median for speed in speeds],
        xerr=[
            [speed.median - speed.low for speed in speeds],
            [speed.high - speed.median for speed in speeds],
        ],
        color=[PALE if row.name == PLAIN else BAR for row in rows],
        ecolor=INK,
        capsize=3,
        height=0.62,
    )
    axes.set_yticks(places, [row.name for row in rows])
    longest = max(speed.high for speed in speeds)
    model, loader = ledger.ceilings[MODEL].median, ledger.ceilings[LOADER].median
    near = [ceiling for ceiling in (model, loader) if ceiling < 1.5 * longest]
    reach = 1.1 * max(longest, *near)
    for place, row in zip(places, rows, strict=True):
        _label(axes, place, row, inside=row.images_per_s.low > 0.4 * reach)
    _ceiling(axes, model, "model alone", "#b5452c", reach, height=-0.62)
    _ceiling(axes, loader, "loader alone", "#3f8f4f", reach, height=-0.92)
    axes.set_ylim(len(rows) - 0.5, -1.15)
    axes.set_xlim(0, reach)
    axes.set_xlabel("training throughput, images/s (median, quartiles)")
    axes.spines[["top", "right"]].set_visible(False)
    recipe = ledger.facts.get("recipe") or "your pipeline"
    axes.set_title(f"{recipe}: what each stage brings", loc="left", color=INK)
    figure.text(0.01, -0.01, _caption(ledger), ha="left", va="top", fontsize=8, color=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=150, bbox_inches="tight")
    return buffer.getvalue()


def _label(axes: Any, place: int, row: Row, *, inside: bool) -> None:
    """The figures of a bar: within it where they fit, else behind it."""
    text = f"{row.images_per_s.median:,.0f} images/s    {row.ratio.median:.2f} ×"
    plain = row.name == PLAIN
    if inside:
        color = INK if plain else "white"
        axes.text(row.images_per_s.low, place, f"{text}  ", ha="right", va="center", color=color, fontsize=9)
    else:
        axes.text(row.images_per_s.high, place, f"  {text}", va="center", color=INK, fontsize=9)


def _ceiling(axes: Any, value: float, name: str, color: str, reach: float, *, height: float) -> None:
    """A dashed line where the ceiling stands; one beyond the picture is said at its edge."""
    if value <= reach:
        axes.axvline(value, ymax=0.94, color=color, linestyle="--", linewidth=1.2)
        text, at = f"{name}: {value:,.0f} ", value
    else:
        text, at = f"{name}: {value:,.0f} →", reach
    axes.text(at, height, text, ha="right", va="center", color=color, fontsize=8)


def _caption(ledger: Ledger) -> str:
    machine = ledger.facts["provenance"]
    hardware, versions = machine["hardware"], machine["versions"]
    where = ", ".join(hardware["gpus"]) or f"{hardware['processor']}, {hardware['cores']} cores"
    made = (
        f"{len(ledger.rounds)} interleaved rounds on {where}; torch {versions['torch']}, "
        f"Drivetrain {versions['drivetrain']}, {machine['date'][:10]}: {machine['command']}"
    )
    return "\n".join([*textwrap.wrap(ledger.bound, 118), *textwrap.wrap(made, 118)])
