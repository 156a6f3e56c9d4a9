"""The conclusions of a ledger, in plain sentences: the bottleneck, whether the speedups compound, the caveats."""

from collections.abc import Mapping
from typing import Any

from .data import ADDED, LedgerData
from .statistics import RESOLVED, Ratio, speed_text
from .variant import COPY, LOADER, MODEL, PARTS, PLAIN, VariantId

ALIKE = 0.9  # ceilings with a ratio above this are both the bottleneck
UNSURE = 0.1  # with a larger spread, whether the speedups compound is uncertain
COSTS = 0.98  # a stage whose gain's interval is below this costs speed
NOISE = 1.1  # a pipeline so many times as fast as a ceiling shows that the machine was busy
NOISY = 0.3  # above this spread, conclusions are uncertain: what seems to bring 1.3 × may bring nothing


def bound(ledger: LedgerData) -> str:
    missing = {one: ledger.why_not(one) for one in (ledger.whole, LOADER, MODEL) if not ledger.measured(one)}
    if missing:
        why = ", ".join(f"{one} {why.state if why else 'was not measured'}" for one, why in missing.items())
        return f"The bottleneck is not known: {why}."
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
    if core is not None:
        limits += f" with its batch transforms, loss and hooks, and about {speed_text(core)} without them"
    if core is None or largest not in ADDED:
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
    costly = {one.stage: one.last.value for one in ledger.stages if one.last and one.last.high < COSTS}
    if not costly:
        return ""
    stage = min(costly, key=lambda one: costly[one])
    return f": without {stage} it is {1 / costly[stage]:.2f} × as fast"


def _for_the_loader(ledger: LedgerData) -> str:
    if ledger.facts.get("asked", {}).get("loader") in ("torch", "ffcv_stock"):
        return "change the loader: loader='ffcv'"
    return "load faster: more workers, smaller images"


def _for_the_model(ledger: LedgerData) -> str:
    asked, split = ledger.facts.get("asked", {}), ledger.time_breakdown
    advice = "make the training step faster"
    if split and split["step"] > split["forward"] + split["backward"]:
        return f"{advice}: the optimizer's step takes {split['step']:.0%} of the time"
    if asked.get("precision") == "fp32" and asked.get("bf16", True):  # older ledgers do not know
        return f"{advice}: it computes in fp32; try precision='bf16'"
    if costly := _costly(ledger):
        return f"{advice}{costly}"
    return advice if asked.get("compile", True) else f"{advice}: try compile=True"


def compound(ledger: LedgerData) -> str:
    alone = [ledger.id_of_only(row.stage) for row in ledger.in_turn[1:]]
    if len(alone) < 2 or not all(map(ledger.measured, [*alone, ledger.whole])):
        return ""
    levels, powers = ledger.levels, {**dict.fromkeys(alone, 1), PLAIN: -len(alone)}
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
    stages, drops = ledger.stages, []
    for place, stage in enumerate(stages):
        alone, turn = stage.alone, stage.in_turn
        if place and alone and turn and alone.resolved and turn.resolved:
            earlier = " and ".join(one.stage for one in stages[:place])
            text = f"{stage.stage} gives {alone.value:.2f} × alone and {turn.value:.2f} × after {earlier}"
            drops.append((turn.value / alone.value, text))
    return min(drops, key=lambda one: one[0])[1] if drops else "which stage loses its gain is not resolved"


def caveats(ledger: LedgerData) -> list[str]:
    sentences = []
    rounds = f"{len(ledger.rounds)} round{'s' * (len(ledger.rounds) != 1)}"
    if ledger.stopped:
        width = f"± {ledger.spread:.1%}" if ledger.spread <= RESOLVED else "too wide to be meaningful"
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
        sentences.append("What follows is uncertain, with intervals this wide: increase seconds, on a quiet machine.")
    return sentences


def _too_few(ledger: LedgerData) -> str:
    rounds = len(ledger.rounds)
    if rounds == 1:
        return "one round has no interval; increase seconds"
    return f"{rounds} rounds that differ this much are too few; increase seconds, on a quiet machine"


def _by_reason(head: str, reasons: Mapping[Any, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for one, reason in reasons.items():
        names.setdefault(reason.rstrip("."), []).append(str(one))
    return [f"{head}: {', '.join(which)}: {reason}." for reason, which in names.items()]
