"""What a ledger has measured, as a value: rows, stages, ceilings and shares, derived from the rounds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .rounds import CEILINGS, EXTRAS, PLAIN, SPLIT, Turn, only, without
from .statistics import LEVEL, Figure, Levels, Ratio


@dataclass(frozen=True)
class Row:
    """One variant: its throughput in images/s, that over plain PyTorch's, and that over the row before.

    A variant that could not be measured has None for these, and `note` has the reason; `gain` is None too where
    the row before was not measured.
    """

    name: str
    images_per_s: Figure | None
    ratio: Ratio | None
    gain: Ratio | None
    note: str = ""


@dataclass(frozen=True)
class Gains:
    """What a stage brings, as a ratio of throughputs, in three places; None where a variant was not measured.

    Attributes:
        alone: plain PyTorch with only it, over plain PyTorch.
        in_turn: on top of the stages before it.
        last: the full pipeline, over the full pipeline without it.
    """

    stage: str
    alone: Ratio | None
    in_turn: Ratio | None
    last: Ratio | None


@dataclass(frozen=True, repr=False)
class LedgerData:
    """The figures of a ledger.

    Attributes:
        rounds: one dict per round, from a variant's name to its turn; the raw figures. Every round has the same
            variants, plain PyTorch first.
        facts: recipe, plan, why it stopped, `failed` and `left_out` (variants without figures, with the reasons),
            `in_turn` (names of all rows, measured or not), costs of each variant, provenance.
        level: of the confidence intervals.
    """

    rounds: list[dict[str, Turn]]
    facts: dict[str, Any]
    level: float = LEVEL

    @property
    def levels(self) -> Levels:
        """The speeds of all variants on one scale."""
        return Levels([{name: turn.speed for name, turn in turns.items()} for turns in self.rounds])

    @property
    def _names(self) -> list[str]:
        """Of the rows, plain PyTorch first; also those that were not measured."""
        known: list[str] | None = self.facts.get("in_turn")
        return known or [name for name in self.rounds[0] if name == PLAIN or name.startswith("+ ")]

    def measured(self, name: str | None) -> bool:
        """Whether that variant has turns."""
        return name in self.rounds[0]

    def why_not(self, name: str) -> str:
        """Why a variant has no figures: `"failed: …"` or `"left out: …"`; empty if nothing is known."""
        for kind in ("failed", "left_out"):
            reason = self.facts.get(kind, {}).get(name)
            if reason is not None:
                return f"{kind.replace('_', ' ')}: {reason}"
        return ""

    @property
    def rows(self) -> list[Row]:
        """Plain PyTorch first, the full pipeline last."""
        levels, names = self.levels, self._names
        return [
            Row(
                name,
                levels.speed(name) if self.measured(name) else None,
                self._ratio(levels, name, PLAIN),
                self._ratio(levels, name, last),
                "" if self.measured(name) else self.why_not(name),
            )
            for last, name in zip([PLAIN, *names], names, strict=False)
        ]

    def _ratio(self, levels: Levels, over: str | None, under: str | None) -> Ratio | None:
        """A variant's throughput over another's; None where one of them was not measured."""
        if over is None or under is None or not (self.measured(over) and self.measured(under)):
            return None
        return levels.ratio(over, under, self.level)

    @property
    def whole(self) -> str:
        """Name of the full pipeline's turns; it may have failed, see `measured`."""
        return self._names[-1]

    @property
    def stages(self) -> list[Gains]:
        """What each stage brings alone, in turn, and last of all."""
        levels = self.levels
        found = []
        for before, name in pairwise(self._names):
            stage = name.removeprefix("+ ")
            found.append(
                Gains(
                    stage,
                    self._ratio(levels, self.turns_of_only(stage), PLAIN),
                    self._ratio(levels, name, before),
                    self._ratio(levels, self.whole, self._turns_without(stage)),
                )
            )
        return found

    def name_of_only(self, stage: str) -> str:
        """Name of the turns that have that stage alone; the first in turn is one."""
        return self._names[1] if self._names[1] == f"+ {stage}" else only(stage)

    def name_of_without(self, stage: str) -> str:
        """Name of the full pipeline's turns without that stage; the last but one in turn is one."""
        names = self._names
        if names[-1] == f"+ {stage}":
            return names[-2]
        if len(names) == 3:  # of two stages, the whole without the first is the second alone
            return only(names[2].removeprefix("+ "))
        return without(stage)

    def turns_of_only(self, stage: str) -> str | None:
        """`name_of_only`, if it was measured."""
        name = self.name_of_only(stage)
        return name if self.measured(name) else None

    def _turns_without(self, stage: str) -> str | None:
        name = self.name_of_without(stage)
        return name if self.measured(name) else None

    @property
    def ceilings(self) -> dict[str, Figure]:
        """Throughput in images/s of the loader without a model, of the model without a loader, and of the
        copies to the device where there is one."""
        levels = self.levels
        return {name: levels.speed(name) for name in CEILINGS if self.measured(name)}

    @property
    def waiting(self) -> float | None:
        """Share of the full pipeline's time spent waiting for data, 0 to 1; the median. None: not measured."""
        if not self.measured(self.whole):
            return None
        shares = [turns[self.whole].waited / turns[self.whole].seconds for turns in self.rounds]
        return float(np.median(shares))

    @property
    def split(self) -> dict[str, float]:
        """Shares of the whole's time, 0 to 1: waiting, forward, backward, step, other; empty if not measured.

        Means over turns of its own, in which the GPU is waited for after each part. "other" is the loss, the
        batch methods' own work and the loop.
        """
        if SPLIT not in self.rounds[0]:
            return {}
        turns = [turns[SPLIT] for turns in self.rounds]
        seconds = sum(turn.seconds for turn in turns)
        shares = {"waiting": sum(turn.waited for turn in turns) / seconds}
        for part in ("forward", "backward", "step"):
            shares[part] = sum((turn.parts or {}).get(part, 0.0) for turn in turns) / seconds
        return shares | {"other": max(1 - sum(shares.values()), 0.0)}

    @property
    def extras(self) -> Ratio | None:
        """Time of a step with what `fit` has beside the steps, over that of the whole without: 1.004 for a cost
        of 0.4 %. Bar, CSV log and guard against losses that are not finite. None if not measured."""
        return self._ratio(self.levels, self.whole, EXTRAS)

    @property
    def extras_share(self) -> float | None:
        """Share of a training's time inside the extras' own code, 0 to 1; None if not measured.

        Timed within the turns that have them, so it is known far more exactly than `extras`, which compares turns
        and also sees what the extras slow down elsewhere. At most so much: a short turn logs and draws once, and so
        oftener than `fit`, which logs every 50 steps and draws twice a second.
        """
        turns = [turns[EXTRAS] for turns in self.rounds if EXTRAS in turns]
        if not turns or not all(turn.parts for turn in turns):
            return None
        return sum((turn.parts or {})["extras"] for turn in turns) / sum(turn.seconds for turn in turns)

    def ratios(self) -> dict[str, Ratio]:
        """Every ratio that the tables show, by a name for it: each row's, each stage's gains, the extras' cost."""
        found: dict[str, Ratio | None] = {row.name: row.ratio for row in self.rows}
        for stage in self.stages:
            found[f"{stage.stage} alone"] = stage.alone
            found[f"{stage.stage} in turn"] = stage.in_turn
            found[f"{stage.stage} last"] = stage.last
        found["fit's extras"] = self.extras
        return {name: one for name, one in found.items() if one is not None}

    @property
    def spread(self) -> float:
        """The widest interval of a row's ratio, a stage's gain or the extras' cost: 0.02 for ± 2 %."""
        return max(one.spread for one in self.ratios().values())

    def speed(self, name: str) -> Figure:
        """A variant's images/s."""
        return self.levels.speed(name)

    def ratio(self, name: str, over: str) -> Ratio:
        """A variant's throughput over another's, taken within rounds."""
        return self.levels.ratio(name, over, self.level)

    def product_alone(self) -> dict[str, int] | None:
        """The product of the stages' gains alone, as powers for `Levels.product`; None if one was not measured."""
        powers = {PLAIN: 0}
        for stage in self._names[1:]:
            name = self.turns_of_only(stage.removeprefix("+ "))
            if name is None:
                return None
            powers[name] = 1
            powers[PLAIN] -= 1
        return powers
