"""The plot of a ledger: throughput with the ceilings, what each stage contributes, and the time breakdown."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ...common.errors import require
from ...common.pictures import BAND, BLUE, GREEN, INK, ORANGE, PALE, PURPLE, RED, SKY, literal
from .data import LedgerData, Row
from .findings import bound, caveats, compound
from .statistics import Figure, Ratio, speed_text
from .table import ratio_text
from .variant import COPY, LOADER, MODEL, PLAIN, VariantId

CEILING = {MODEL: RED, LOADER: GREEN, COPY: PURPLE}
PLACES = {"alone": ORANGE, "added in turn": BLUE, "added last": INK}
PARTS = {
    "waiting": GREEN, "transforms": SKY, "forward": RED, "loss": PURPLE, "backward": BLUE, "step": ORANGE,
    "hooks": INK, "other": PALE,
}  # fmt: skip
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a text that a ceiling's line may cross


def picture(ledger: LedgerData) -> Any:
    figure_class = require("matplotlib.figure", "plot", "draw the ledger").Figure
    heights = [1.5 + 0.42 * len(ledger.rows)]
    measured = any(gain and gain.resolved for stage in ledger.stages for gain in _places(stage))
    heights += [1.2 + 0.5 * len(ledger.stages)] if measured else []
    heights += [1.1] if ledger.time_breakdown else []
    figure = figure_class(figsize=(8.5, sum(heights)), layout="constrained")
    panels = iter(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
    _throughput(next(panels), ledger)
    if measured:  # else its axis would be made up
        _gains(next(panels), ledger)
    if ledger.time_breakdown:
        _split(next(panels), ledger)
    figure.text(0.01, -0.01, literal(caption(ledger)), ha="left", va="top", fontsize=8, color=INK)
    return figure


def _throughput(axes: Any, ledger: LedgerData) -> None:
    rows = ledger.rows
    drawn = [(place, row, row.images_per_s) for place, row in enumerate(rows) if row.images_per_s]
    speeds = [speed for _, _, speed in drawn]
    axes.barh(
        [place for place, _, _ in drawn], [speed.value for speed in speeds], xerr=_errors(speeds),
        color=[PALE if row.id == PLAIN else BLUE for _, row, _ in drawn], ecolor=INK, capsize=3, height=0.62,
    )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    longest = max(speed.high for speed in speeds)
    tops = {one: figure.value for one, figure in ledger.ceilings.items()}
    reach = 1.1 * max(longest, *(top for top in tops.values() if top < 1.5 * longest), 0)
    for place, row, speed in drawn:
        _label(axes, place, ledger, row, speed, inside=speed.low > 0.45 * reach)
    for place, row in enumerate(rows):
        if row.images_per_s is None:
            note = textwrap.shorten(row.note or "left out", 70, placeholder=" …")
            axes.text(0, place, f"  {literal(note)}", va="center", color=INK, fontsize=9, style="italic")
    for number, (one, top) in enumerate(sorted(tops.items(), key=lambda item: item[1])):
        _ceiling(axes, one, top, reach, height=-0.62 - 0.34 * number)
    axes.set_ylim(len(rows) - 0.5, -0.62 - 0.34 * len(tops))
    axes.set_xlim(0, reach)
    axes.set_xlabel("training throughput, images/s (trimmed mean, quartiles)")
    _title(axes, f"{ledger.facts.get('recipe') or 'your pipeline'}: each stage added in turn")


def _errors(values: Sequence[Figure | Ratio]) -> list[list[float]]:
    return [[one.value - one.low for one in values], [one.high - one.value for one in values]]


def _label(axes: Any, place: int, ledger: LedgerData, row: Row, speed: Figure, *, inside: bool) -> None:
    over = ratio_text(ledger, row.ratio, row.id)
    if row.ratio and row.ratio.resolved:
        over = f"{row.ratio.value:.2f} ×"
    text = f"{speed_text(speed.value)} images/s    {over}"
    if inside:
        color = INK if row.id == PLAIN else "white"
        axes.text(speed.low, place, f"{text}  ", ha="right", va="center", color=color, fontsize=9)
    else:
        axes.text(speed.high, place, f"  {text}", va="center", color=INK, fontsize=9, bbox=BEHIND)


def _ceiling(axes: Any, ceiling: VariantId, value: float, reach: float, *, height: float) -> None:
    color = CEILING[ceiling]
    if value <= reach:
        axes.axvline(value, color=color, linestyle="--", linewidth=1.2)
        text, at = f"{ceiling}: {speed_text(value)} ", value
    else:
        text, at = f"{ceiling}: {speed_text(value)} →", reach
    axes.text(at, height, text, ha="right", va="center", color=color, fontsize=8, bbox=BEHIND)


def _places(stage: Any) -> tuple[Ratio | None, ...]:
    return stage.alone, stage.in_turn, stage.last


def _gains(axes: Any, ledger: LedgerData) -> None:
    """Draw each stage's gains; an unresolved one has no point: its interval would be wider than the plot."""
    stages = ledger.stages
    for number, (place, color) in enumerate(PLACES.items()):
        each = [_places(stage)[number] for stage in stages]
        gains = {at + 0.24 * (number - 1): gain for at, gain in enumerate(each) if gain and gain.resolved}
        axes.errorbar(
            [gain.value for gain in gains.values()], list(gains), xerr=_errors(list(gains.values())),
            fmt="o", color=color, markersize=5, capsize=2, linewidth=1.2, label=place,
        )  # fmt: skip
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(stages)), [stage.stage for stage in stages])
    axes.set_ylim(len(stages) - 0.5, -0.5)
    for at in range(0, len(stages), 2):
        axes.axhspan(at - 0.5, at + 0.5, color=BAND, zorder=0)
    axes.set_xlabel(f"speedup by it ({ledger.level:.0%} intervals)")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _title(axes, "what each stage contributes")


def _split(axes: Any, ledger: LedgerData) -> None:
    left = 0.0
    for name, fraction in ledger.time_breakdown.items():
        axes.barh(0, fraction, left=left, color=PARTS[name], height=0.6, label=f"{name} {fraction:.0%}")
        left += fraction
    axes.set_yticks([])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _title(axes, "where the full pipeline's time goes")


def _title(axes: Any, text: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(literal(text), loc="left", color=INK, fontsize=11)


def machine_text(known: Mapping[str, Any]) -> str:
    """Return the hardware and the versions of a provenance, in words."""
    hardware, versions = known["hardware"], known["versions"]
    where = ", ".join(hardware["gpus"]) or f"{hardware['processor']}, {hardware['cores']} cores"
    return f"{where}; torch {versions['torch']}, Drivetrain {versions['drivetrain']}"


def caption(ledger: LedgerData) -> str:
    made = f"{len(ledger.rounds)} interleaved round{'s' * (len(ledger.rounds) != 1)}"
    machine = ledger.facts.get("provenance")
    if machine:
        made += f" on {machine_text(machine)}, {machine['date'][:10]}: {machine['command']}"
    sentences = [line for line in (*caveats(ledger), compound(ledger), bound(ledger), made) if line]
    return "\n".join(line for one in sentences for line in textwrap.wrap(one, 124))
