"""What the ledger's figures mean, each in one plain sentence: the bound, and whether the speedups compound."""

from __future__ import annotations

from .ledger_result import Gains, Ledger
from .ledger_rounds import COPY, LOADER, MODEL, PLAIN
from .ledger_statistics import Ratio, ratio

ALIKE = 0.9  # two ceilings closer than this bind alike
UNSURE = 0.1  # what is known less exactly than this is not said to compound
COSTS = 0.98  # a stage whose gain is surely below this costs speed


def bound(ledger: Ledger) -> str:
    """Which of loader, copy and model binds, how far the whole is from it, and what to change next."""
    whole = ledger.rows[-1].images_per_s.median
    tops = {name: one.median for name, one in ledger.ceilings.items()}
    loader, model = tops[LOADER], tops[MODEL]
    lowest = min(tops, key=lambda name: tops[name])
    reach = f"the whole reaches {whole:,.0f} images/s, {whole / tops[lowest]:.0%} of"
    alone = f"alone, the loader gives {loader:,.0f} images/s and the model takes {model:,.0f}"
    waits = f"and waits for data {ledger.waiting:.0%} of the time"
    if lowest == COPY:
        return (
            f"The copy to the device binds: it moves {tops[COPY]:,.0f} images/s; {alone}; {reach} the copy, {waits}. "
            "Next, copy less: smaller images, or the FFCV loader, which copies bytes and normalises there."
        )
    if min(loader, model) / max(loader, model) > ALIKE:
        return f"Loader and model bind alike: {alone}; {reach} that, {waits}. To go on, both must get faster."
    if lowest == MODEL:
        return f"The model binds: {alone}; {reach} its model, {waits}. Next, {_for_the_model(ledger)}."
    return f"The loader binds: {alone}; {reach} its loader, {waits}. Next, {_for_the_loader(ledger)}."


def _for_the_loader(ledger: Ledger) -> str:
    if ledger.facts.get("asked", {}).get("loader") == "torch":
        return "change the loader: loader='ffcv'"
    return "load faster: more workers, smaller images"


def _for_the_model(ledger: Ledger) -> str:
    """The first of what is likely to help most: what costs much, what is missing."""
    asked, split = ledger.facts.get("asked", {}), ledger.split
    advice = "make the training step faster"
    if split and split["step"] > split["forward"] + split["backward"]:
        return f"{advice}: the optimizer's step takes {split['step']:.0%} of the time"
    if asked.get("precision") == "fp32":
        return f"{advice}: it computes in fp32, and precision='bf16' is the stage to try"
    costly = [(gain.last.value, gain) for gain in ledger.stages if gain.last and gain.last.high < COSTS]
    if costly:
        value, gain = min(costly, key=lambda pair: pair[0])
        return f"{advice}: without {gain.stage} it is {1 / value:.2f} × as fast"
    if asked and not asked["compile"]:
        return f"{advice}: compile=True is the stage to try"
    return advice


def compound(ledger: Ledger) -> str:
    """Whether the gains alone multiply to the whole's; empty if there are not two, or one was left out."""
    products, kept = ledger.product_alone(), _kept(ledger)
    if products is None or kept is None:
        return ""
    total, product = ledger.ratio(ledger.whole, PLAIN), ratio(products, ledger.level)
    figures = (
        f"alone the stages multiply to {product.value:.2f} ×, together they bring {total.value:.2f} ×, "
        f"{kept.value:.0%} of it ({kept.low:.0%} to {kept.high:.0%})"
    )
    if kept.holds(1.0) and kept.spread > UNSURE:
        return f"It is not sure whether the speedups compound: {figures}. Give more seconds."
    if kept.holds(1.0):
        return f"The speedups compound: {figures}."
    if kept.low > 1:
        return f"The speedups more than compound: {figures}."
    return f"The speedups do not compound: {figures}; {_in_the_way(ledger)}."


def loses(ledger: Ledger) -> bool:
    """Whether the whole surely brings less than the product of the gains alone."""
    kept = _kept(ledger)
    return kept is not None and kept.high < 1


def _kept(ledger: Ledger) -> Ratio | None:
    """The whole's gain over the product of the gains alone; None without it, or with fewer than two stages."""
    products = ledger.product_alone()
    if products is None or len(ledger.stages) < 2:
        return None
    return ratio(
        [
            turns[ledger.whole].speed / turns[PLAIN].speed / one
            for turns, one in zip(ledger.rounds, products, strict=True)
        ],
        ledger.level,
    )


def _in_the_way(ledger: Ledger) -> str:
    """The pair that was measured to lose most; else the stage that falls furthest, after those before it."""
    lost = {name: kept for name, kept in ledger.pairs.items() if kept.high < 1}
    gains = ledger.stages
    if lost:
        name, kept = min(lost.items(), key=lambda item: item[1].value)
        return f"{name} stand in each other's way: the two keep {kept.value:.0%} of their product"
    stage = fallen(ledger)
    earlier = [gain.stage for gain in gains][: gains.index(stage)]
    assert stage.alone is not None  # there is a product
    return (
        f"{stage.stage} brings {stage.alone.value:.2f} × alone and {stage.in_turn.value:.2f} × after "
        f"{' and '.join(earlier)}"
    )


def fallen(ledger: Ledger) -> Gains:
    """The stage whose gain in turn falls furthest below its gain alone."""
    return min(
        (gain for gain in ledger.stages[1:] if gain.alone is not None),
        key=lambda gain: gain.in_turn.value / (gain.alone.value if gain.alone else 1),
    )
