"""The ledger as text: tables in a terminal and in a notebook, and what is to be said below them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..transforms.table import drawn
from .ledger_result import Ledger
from .ledger_rounds import EXTRAS, PLAIN
from .ledger_statistics import Figure, Ratio

NOISY = 0.3
"""Above this spread the findings are a guess: a stage that seems to bring 1.3 × may bring nothing."""


@dataclass(frozen=True)
class Cells:
    """A table: its title, column heads, rows, the caption below it, and after which row a line is drawn."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    line_after: int | None = None


def text(ledger: Ledger) -> str:
    """For a terminal."""
    return "\n".join([*map(rendered, tables(ledger)), *sentences(ledger)])


def html_text(ledger: Ledger) -> str:
    """For a notebook."""
    return "".join(
        [*map(html_table, tables(ledger)), *(f"<p>{html.escape(s)}</p>" for s in sentences(ledger))]
    )


def rendered(cells: Cells) -> str:
    """A table drawn with lines."""
    table = Table(
        title=escape(cells.title), caption=escape(cells.caption), title_justify="left", caption_justify="left"
    )
    for number, head in enumerate(cells.heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for number, row in enumerate(cells.rows, 1):
        table.add_row(*map(escape, row), end_section=number == cells.line_after)
    return drawn(table, 110)


def html_table(cells: Cells) -> str:
    """A table as HTML, aligned and with the line as in a terminal; notebooks differ in what they do by themselves."""

    def line(row: Sequence[str], tag: str, look: str = "") -> str:
        sides = ["left", *["right"] * (len(row) - 1)]
        cells = (
            f"<{tag} style='text-align:{side};white-space:nowrap{look}'>{html.escape(cell)}</{tag}>"
            for side, cell in zip(sides, row, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    title = f"<caption style='text-align:left'>{html.escape(cells.title)}</caption>"
    body = "".join(
        line(row, "td", ";border-bottom:1px solid" if number == cells.line_after else "")
        for number, row in enumerate(cells.rows, 1)
    )
    foot = f"<p><i>{html.escape(cells.caption)}</i></p>" if cells.caption else ""
    return f"<table>{title}{line(cells.heads, 'th')}{body}</table>{foot}"


def tables(ledger: Ledger) -> list[Cells]:
    """The rows in turn with the ceilings; the stages; accuracies, if they were asked for."""
    found = [_rows(ledger)]
    if len(ledger.stages) > 1:
        found.append(_stages(ledger))
    if "accuracy" in ledger.facts:
        found.append(_accuracies(ledger.facts["accuracy"]))
    return found


def _rows(ledger: Ledger) -> Cells:
    costs = ledger.facts.get("costs", {})
    rows = [
        (row.name, _figure(row.images_per_s), "1.00" if row.name == PLAIN else _ratio(row.ratio),
         "" if row.name == PLAIN else f"× {row.gain.value:.2f}", _memory(costs.get(row.name, {})))
        for row in ledger.rows
    ]  # fmt: skip
    whole = len(rows)
    if ledger.extras:
        gain = f"× {1 / ledger.extras.value:.2f}"
        rows.append((EXTRAS, _figure(ledger.speed(EXTRAS)), _ratio(ledger.ratio(EXTRAS, PLAIN)), gain, ""))
    rows += [(f"ceiling: {name}", _figure(one), "", "", "") for name, one in ledger.ceilings.items()]
    return Cells(
        f"Ledger: {ledger.facts.get('recipe') or 'your pipeline'}",
        ("", "images/s", "over plain", "this stage", "MiB held"),
        rows,
        f"images/s: median and quartiles of {len(ledger.rounds)} interleaved rounds; ratios: trimmed mean and "
        f"{ledger.level:.0%} interval; MiB held: weights, gradients, optimizer of a rank",
        whole,
    )


def _stages(ledger: Ledger) -> Cells:
    return Cells(
        "What each stage brings",
        ("stage", "alone, over plain", "added in turn", "added last"),
        [
            (gain.stage, *(_ratio(one) for one in (gain.alone, gain.in_turn, gain.last)))
            for gain in ledger.stages
        ],
        "added last: the whole, over the whole without it",
    )


def _accuracies(found: dict[str, Any]) -> Cells:
    def seconds(value: float | None) -> str:
        return "not reached" if value is None else f"{value:,.1f} s"

    return Cells(
        f"Trained for {found['epochs']} epoch(s), once each, from one seed",
        ("", "top-1", "time", f"time to {found['target']:.2%}"),
        [
            (name, f"{row['accuracy']:.2%}", seconds(row["seconds"]), seconds(row["seconds_to_target"]))
            for name, row in found["rows"].items()
        ],
        "times of whole epochs, evaluation included",
    )


def sentences(ledger: Ledger) -> list[str]:
    """What is said below the tables; the bound comes last."""
    facts = ledger.facts
    found = []
    if ledger.split:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in ledger.split.items())
        found.append(f"The whole's time: {shares}.")
    if ledger.extras_share is not None:
        found.append(
            "fit's extras (bar, CSV log, guard against losses that are not finite) take at most "
            f"{ledger.extras_share:.2%} of the time."
        )
    found += _costs(facts.get("costs", {}))
    if "stopped" in facts:
        found.append(
            f"It ended because {facts['stopped']}; the widest interval is ± {ledger.spread:.1%} after "
            f"{len(ledger.rounds)} rounds."
        )
    reasons: dict[str, list[str]] = {}
    for name, reason in facts.get("left_out", {}).items():
        reasons.setdefault(reason, []).append(name)
    found += [f"Left out: {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    if ledger.spread > NOISY:
        found.append(
            "What follows is not sure, with intervals as wide as these: give more seconds, on a quiet machine."
        )
    return [*found, *filter(None, [ledger.compound]), ledger.bound]


def _costs(costs: dict[str, Any]) -> list[str]:
    """Peak memory and compile time, where they were measured."""
    peaks = [f"{name} {cost['peak_bytes'] / 2**20:,.0f} MiB"
             for name, cost in costs.items() if cost["peak_bytes"] is not None]  # fmt: skip
    compiling = [f"{name} {cost['compile_seconds']:.1f} s"
                 for name, cost in costs.items() if cost["compile_seconds"] is not None]  # fmt: skip
    found = [f"Peak memory per rank: {', '.join(peaks)}."] if peaks else []
    return found + ([f"Compiling took, before the measurement: {', '.join(compiling)}."] if compiling else [])


def _memory(cost: dict[str, Any]) -> str:
    held = cost.get("held_bytes")
    if held is None:
        return ""
    return f"{(held['parameters'] + held['gradients'] + held['optimizer']) / 2**20:,.1f}"


def _figure(one: Figure) -> str:
    return f"{one.median:,.0f}  ({one.low:,.0f} to {one.high:,.0f})"


def _ratio(one: Ratio | None) -> str:
    return "left out" if one is None else f"{one.value:.2f}  ({one.low:.2f} to {one.high:.2f})"
