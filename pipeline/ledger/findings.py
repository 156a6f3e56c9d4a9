"""The conclusions of a ledger, in plain sentences: the bottleneck, whether the speedups compound, the caveats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..measuring.statistics import Ratio, speed_text
from .data import ADDED, COPY, LOADER, MODEL, PARTS, PLAIN, Gains, LedgerData, VariantId

ALIKE = 0.9  # ceilings with a ratio above this are both the bottleneck
UNSURE = 0.1  # with a larger spread, whether the speedups compound is uncertain
COSTS = 0.98  # a stage whose gain's interval is below this costs speed
NOISE = 1.1
"""A pipeline that is this many times as fast as a ceiling shows that the ceilings were measured on a busy machine."""
NOISY = 0.3
"""Above this spread, conclusions are uncertain: a stage that seems to bring 1.3 × may bring nothing."""


def bound(ledger: LedgerData) -> str:
    """Return the bottleneck, how close the full pipeline gets to that limit, and what to change next; or that it is not
    known, if the intervals do not tell."""
    missing = [one for one in (ledger.whole, LOADER, MODEL) if not ledger.measured(one)]
    if missing:
        why = [
            f"{one} {why.state if (why := ledger.why_not(one)) else 'was not measured'}" for one in missing
        ]
        return f"The bottleneck is not known: {', '.join(why)}."
    tops = {one: figure.value for one, figure in ledger.ceilings.items()}
    lowest, second = sorted(tops, key=lambda one: tops[one])[:2]
    limits = f"the loader alone delivers {speed_text(tops[LOADER])} images/s, the model alone {speed_text(tops[MODEL])}"
    reached = ledger.ratio(ledger.whole, lowest)
    if reached.low > 1 and reached.value > NOISE:
        return (
            f"The bottleneck is not known: {limits}, but the full pipeline reaches "
            f"{speed_text(ledger.speed(ledger.whole).value)}. The machine was busy; measure on a quiet one."
        )
    reach = (
        f"The full pipeline reaches {speed_text(ledger.speed(ledger.whole).value)} images/s, {_share(reached)}, "
        f"and waits for data {ledger.waiting:.0%} of the time."
    )
    between = ledger.ratio(lowest, second)
    alike = between.value > ALIKE or between.holds(1.0)
    if alike and COPY not in (lowest, second) and between.spread <= UNSURE:
        return f"Loader and model are both the bottleneck: {limits}. {reach} Next, both must get faster."
    if between.holds(1.0):
        return (
            f"Which of {lowest} and {second} is the bottleneck is not known, as their intervals overlap: {limits}. "
            f"{reach} Increase seconds, on a quiet machine."
        )
    return _named(ledger, lowest, limits, reach)


def _named(ledger: LedgerData, lowest: VariantId, limits: str, reach: str) -> str:
    if lowest == COPY:
        return (
            f"The copy to the device is the bottleneck: it moves {speed_text(ledger.speed(COPY).value)} images/s; "
            f"{limits}. {reach} "
            "Next, copy less: smaller images, or the FFCV loader, which copies bytes and normalizes on the device."
        )
    if lowest == LOADER:
        return f"The loader is the bottleneck: {limits}. {reach} Next, {_for_the_loader(ledger)}."
    split, core = ledger.time_breakdown, ledger.model_without_additions
    largest = max(PARTS, key=lambda one: split.get(one, 0.0))
    if core is None:
        return f"The model is the bottleneck: {limits}. {reach} Next, {_for_the_model(ledger)}."
    limits += f" with its batch transforms, loss and hooks, and about {speed_text(core)} without them"
    if largest not in ADDED:
        return f"The model is the bottleneck: {limits}. {reach} Next, {_for_the_model(ledger)}."
    words, verb = _ADDED[largest]
    return (
        f"{words} {verb} the bottleneck, with {split[largest]:.0%} of the time: {limits}. {reach} Next, make "
        f"{words[0].lower()}{words[1:]} faster{_costly(ledger)}."
    )


_ADDED = {
    "transforms": ("The batch transforms", "are"),
    "loss": ("The loss", "is"),
    "hooks": ("The hooks around the optimizer's step", "are"),
}


def _share(reached: Ratio) -> str:
    """Return the fraction of the limit that is reached; above 1, it shows that the limit is uncertain."""
    if not reached.resolved:
        return "which fraction of that limit is not resolved"
    if reached.value <= 1:
        return f"{reached.value:.0%} of that limit"
    return f"all of that limit, which is uncertain ({reached.low:.0%} to {reached.high:.0%})"


def _costly(ledger: LedgerData) -> str:
    """Return which stage costs most speed; "" if none does."""
    costly = [(gain.last.value, gain) for gain in ledger.stages if gain.last and gain.last.high < COSTS]
    if not costly:
        return ""
    value, gain = min(costly, key=lambda pair: pair[0])
    return f": without {gain.stage} it is {1 / value:.2f} × as fast"


def _for_the_loader(ledger: LedgerData) -> str:
    if ledger.facts.get("asked", {}).get("loader") in ("torch", "ffcv_stock"):
        return "change the loader: loader='ffcv'"
    return "load faster: more workers, smaller images"


def _for_the_model(ledger: LedgerData) -> str:
    """Return the change that is likely to help most."""
    asked, split = ledger.facts.get("asked", {}), ledger.time_breakdown
    advice = "make the training step faster"
    if split and split["step"] > split["forward"] + split["backward"]:
        return f"{advice}: the optimizer's step takes {split['step']:.0%} of the time"
    if asked.get("precision") == "fp32" and asked.get("bf16", True):  # older ledgers do not know
        return f"{advice}: it computes in fp32; try precision='bf16'"
    if costly := _costly(ledger):
        return f"{advice}{costly}"
    if asked and not asked["compile"]:
        return f"{advice}: try compile=True"
    return advice


def compound(ledger: LedgerData) -> str:
    """Return whether the gains alone multiply to the full pipeline's; empty with fewer than two, or if one was not
    measured."""
    powers = ledger.product_alone()
    if powers is None or len(ledger.stages) < 2 or not ledger.measured(ledger.whole):
        return ""
    levels = ledger.levels
    product = levels.product(powers, ledger.level)
    total = levels.ratio(ledger.whole, PLAIN, ledger.level)
    share = {one: -power for one, power in powers.items()}
    share[PLAIN] -= 1
    share[ledger.whole] = share.get(ledger.whole, 0) + 1
    kept = levels.product(share, ledger.level)
    if not (product.resolved and total.resolved and kept.resolved):
        return f"Whether the speedups compound is not resolved: {_too_few(ledger)}."
    figures = (
        f"alone the stages multiply to {product.value:.2f} ×, together they bring {total.value:.2f} ×, "
        f"{kept.value:.0%} of it ({kept.low:.0%} to {kept.high:.0%})"
    )
    if kept.holds(1.0) and kept.spread > UNSURE:
        return f"It is uncertain whether the speedups compound: {figures}. Increase seconds."
    if kept.holds(1.0):
        return f"The speedups compound: {figures}."
    if kept.low > 1:
        return f"The speedups more than compound: {figures}."
    return f"The speedups do not compound: {figures}; {_in_the_way(ledger)}."


def _in_the_way(ledger: LedgerData) -> str:
    """Describe the stage that loses most of its gain on top of those before it."""
    drops = [(gain, kept) for gain in ledger.stages[1:] if (kept := _kept_in_turn(gain)) is not None]
    if not drops:
        return "which stage loses its gain is not resolved"
    stage = min(drops, key=lambda pair: pair[1])[0]
    earlier = [gain.stage for gain in ledger.stages]
    earlier = earlier[: earlier.index(stage.stage)]
    assert stage.alone is not None  # as in _kept_in_turn
    assert stage.in_turn is not None
    return (
        f"{stage.stage} brings {stage.alone.value:.2f} × alone and {stage.in_turn.value:.2f} × after "
        f"{' and '.join(earlier)}"
    )


def _kept_in_turn(gain: Gains) -> float | None:
    """Return a stage's gain in turn over its gain alone; None if one is unknown."""
    if not (gain.alone and gain.in_turn and gain.alone.resolved and gain.in_turn.resolved):
        return None
    return gain.in_turn.value / gain.alone.value


def caveats(ledger: LedgerData) -> list[str]:
    """See `Ledger.caveats`."""
    sentences = []
    rounds = f"{len(ledger.rounds)} round{'s' * (len(ledger.rounds) != 1)}"
    if ledger.stopped:
        widest = ledger.spread
        width = f"± {widest:.1%}" if _shown(widest) else "too wide to be meaningful"
        sentences.append(f"{ledger.stopped} after {rounds}; the widest interval is {width}.")
    sentences += ledger.notes
    sentences += _by_reason("Failed", ledger.failed)
    sentences += _by_reason("Left out", {**ledger.left_out, **ledger.missing_costs})
    if ledger.accuracy is not None:
        reasons = {one: row.failed for one, row in ledger.accuracy.rows.items() if row.failed}
        sentences += _by_reason("Training failed", reasons)
    unresolved = [name for name, one in ledger.ratios().items() if not one.resolved]
    if unresolved:
        sentences.append(
            f"Not resolved, because the interval extends beyond a factor of two to each side: "
            f"{', '.join(unresolved)}: {_too_few(ledger)}."
        )
    if ledger.spread > NOISY:
        sentences.append(
            "What follows is uncertain, with intervals this wide: increase seconds, on a quiet machine."
        )
    return sentences


def _shown(spread: float) -> bool:
    return Ratio(1.0, 1 / (1 + spread), 1 + spread, 2).resolved


def _too_few(ledger: LedgerData) -> str:
    """Return why a ratio is not resolved, and the remedy."""
    rounds = len(ledger.rounds)
    if rounds == 1:
        return "one round has no interval; increase seconds"
    return f"{rounds} rounds that differ this much are too few; increase seconds, on a quiet machine"


def _by_reason(head: str, reasons: Mapping[Any, str]) -> list[str]:
    """Return one sentence for each reason, with everything it applies to."""
    names: dict[str, list[str]] = {}
    for one, reason in reasons.items():
        names.setdefault(reason.rstrip("."), []).append(str(one))
    return [f"{head}: {', '.join(which)}: {reason}." for reason, which in names.items()]
