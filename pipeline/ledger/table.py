"""The ledger as text: its tables, and the sentences below them."""

from collections.abc import Mapping
from itertools import pairwise

from ...common.table import Table
from .data import Accuracies, LedgerData, Trained
from .findings import bound, caveats, compound
from .statistics import UNRESOLVED, Figure, Ratio, speed_text
from .variant import EXTRAS, PLAIN, Costs, VariantId

PRECISE = 0.03  # the widest interval for an overhead of a few percent


def tables(ledger: LedgerData) -> list[Table]:
    drawn = [_rows(ledger)]
    if len(ledger.stages) > 1:
        drawn.append(_stages(ledger))
    if ledger.accuracy is not None:
        drawn.append(_accuracies(ledger.accuracy))
    return drawn


def _rows(ledger: LedgerData) -> Table:
    rows = [
        (
            row.name,
            _figure(row.images_per_s) if row.images_per_s else row.missing.state if row.missing else "",
            "1.00" if row.id == PLAIN else ratio_text(ledger, row.ratio, row.id),
            "" if row.id == PLAIN else _gain(ledger, row.gain, row.id, before),
            _memory(ledger.costs.get(row.id, Costs())),
        )
        for before, row in zip([PLAIN, *ledger.in_turn], ledger.rows, strict=False)
    ]
    whole = len(rows)
    if ledger.extras:
        gain = _overhead(ledger, ledger.extras)
        over = ratio_text(ledger, ledger.ratio(EXTRAS, PLAIN), EXTRAS)
        rows.append((str(EXTRAS), _figure(ledger.speed(EXTRAS)), over, gain, ""))
    rows += [(f"ceiling: {name}", _figure(one), "", "", "") for name, one in ledger.ceilings.items()]
    if ledger.model_without_additions is not None:
        about = f"about {speed_text(ledger.model_without_additions)}"
        rows.append(("ceiling: model alone, without batch transforms, loss and hooks", about, "", "", ""))
    rows += [(str(one), _figure(ledger.speed(one)), "", "", "") for one in ledger.others]
    return Table(
        ("", "images/s", "over plain", "this stage", "MiB held"), rows,
        f"Ledger: {ledger.facts.get('recipe') or 'your pipeline'}",
        f"images/s: trimmed mean and quartiles of {len(ledger.rounds)} interleaved round"
        f"{'s' * (len(ledger.rounds) != 1)}; ratios: of these means, with {ledger.level:.0%} intervals from within the "
        "rounds; MiB held: weights, gradients and optimizer state of a rank", figures=True, line_after=whole,
    )  # fmt: skip


def _overhead(ledger: LedgerData, extras: Ratio) -> str:
    """If the interval is wider than a few percent, `extras_share`, timed inside the trials, is all that is known."""
    if not extras.resolved or ledger.extras_share is None:
        return UNRESOLVED if not extras.resolved else f"× {1 / extras.value:.2f}"
    known = extras.low > 1 or (extras.holds(1.0) and extras.spread <= PRECISE)
    return f"× {1 / extras.value:.2f}" if known else "within the noise"


def _gain(ledger: LedgerData, gain: Ratio | None, one: VariantId, before: VariantId) -> str:
    """Return the ratio to the previous row, without the interval, which the second table has."""
    if gain is not None and gain.resolved:
        return f"× {gain.value:.2f}"
    return ratio_text(ledger, gain, one, before)


def _stages(ledger: LedgerData) -> Table:
    rows = [
        (
            gain.stage,
            ratio_text(ledger, gain.alone, ledger.id_of_only(gain.stage)),
            ratio_text(ledger, gain.in_turn, own, before),
            ratio_text(ledger, gain.last, ledger.id_of_without(gain.stage), ledger.whole),
        )
        for (before, own), gain in zip(pairwise(ledger.in_turn), ledger.stages, strict=True)
    ]
    return Table(
        ("stage", "alone, over plain", "added in turn", "added last"), rows, "What each stage contributes",
        "added last: the full pipeline, over the full pipeline without it", figures=True,
    )  # fmt: skip


def _accuracies(measured: Accuracies) -> Table:
    def line(one: VariantId, row: Trained) -> tuple[str, ...]:
        if row.accuracy is None or row.seconds is None:
            return str(one), "failed", "", ""
        reached = "not reached" if row.seconds_to_target is None else f"{row.seconds_to_target:,.1f} s"
        # Without a target, it is plain PyTorch's accuracy, whose training failed.
        to_target = "" if measured.target is None else reached
        return str(one), f"{row.accuracy:.2%}", f"{row.seconds:,.1f} s", to_target

    target = "target" if measured.target is None else f"{measured.target:.2%}"
    return Table(
        ("", "top-1" if measured.metric == "top1" else measured.metric.replace("_", " "), "time", f"time to {target}"),
        [line(one, row) for one, row in measured.rows.items()],
        f"Trained for {measured.epochs} epoch(s), once each, from the same seed",
        "times of full epochs, including evaluation", figures=True,
    )  # fmt: skip


def sentences(ledger: LedgerData) -> list[str]:
    lines = []
    if ledger.time_breakdown:
        fractions = ", ".join(f"{name} {fraction:.0%}" for name, fraction in ledger.time_breakdown.items())
        lines.append(f"Time of the full pipeline: {fractions}.")
    if ledger.extras_share is not None:
        lines.append(
            "fit's extras (progress bar, CSV log, guard against non-finite losses) take at most "
            f"{ledger.extras_share:.2%} of the time."
        )
    lines += [
        f"{one}: {ratio_text(ledger, ratio, one)} × that of the pipeline's own loader."
        for one, ratio in ledger.others.items()
    ]
    lines += _costs(ledger.costs)
    return [*lines, *caveats(ledger), *filter(None, [compound(ledger)]), bound(ledger)]


def _costs(costs: Mapping[VariantId, Costs]) -> list[str]:
    peaks = {one: cost.peak_bytes for one, cost in costs.items()}
    compiling = {one: cost.compile_seconds for one, cost in costs.items()}
    peak = ", ".join(f"{one} {size / 2**20:,.0f} MiB" for one, size in peaks.items() if size is not None)
    compiled = ", ".join(f"{one} {time:.1f} s" for one, time in compiling.items() if time is not None)
    lines = [f"Peak memory per rank: {peak}."] if peak else []
    return lines + ([f"Compile time, before the measurement: {compiled}."] if compiled else [])


def _memory(cost: Costs) -> str:
    held = cost.held_bytes
    return f"{(held['parameters'] + held['gradients'] + held['optimizer']) / 2**20:,.1f}" if held else ""


def _figure(one: Figure) -> str:
    return f"{speed_text(one.value)}  ({speed_text(one.low)} to {speed_text(one.high)})"


def ratio_text(ledger: LedgerData, ratio: Ratio | None, one: VariantId, other: VariantId = PLAIN) -> str:
    if ratio is not None:
        return ratio.text
    if ledger.measured(one):
        return f"needs {other}"
    why = ledger.why_not(one)
    return "left out" if why is None else why.state
