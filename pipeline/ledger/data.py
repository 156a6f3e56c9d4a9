"""The measurements of a ledger: trials by variant, and the rows, gains, ceilings and fractions derived from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from .statistics import LEVEL, Figure, Levels, Ratio
from .variant import COPY, EXTRAS, LOADER, MODEL, PARTS, PLAIN, SPLIT, Costs, Trial, VariantId, only, without

CEILINGS = (LOADER, MODEL, COPY)
ADDED = ("transforms", "loss", "hooks")  # the parts that are not the model's or the optimizer's


@dataclass(frozen=True)
class Trained:
    accuracy: float | None = None  # the monitored metric after the last epoch, 0 to 1; None if it failed
    seconds: float | None = None  # of all epochs, including evaluation, starting of workers and compiling
    seconds_to_target: float | None = None  # None if the target was not reached
    failed: str = ""  # the reason


@dataclass(frozen=True)
class Accuracies:
    epochs: int  # of each
    target: float | None  # of the metric, 0 to 1, for the time to accuracy
    rows: Mapping[VariantId, Trained]  # the completed runs, plain PyTorch first
    metric: str = "top1"  # that the task monitors


@dataclass(frozen=True)
class Missing:
    state: Literal["failed", "left out"]
    reason: str

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}"


@dataclass(frozen=True)
class Row:
    """A row of the main table; figures are None if a variant was not measured."""

    id: VariantId
    images_per_s: Figure | None
    ratio: Ratio | None  # over plain PyTorch
    gain: Ratio | None  # over the previous row
    missing: Missing | None = None

    @property
    def name(self) -> str:
        return str(self.id)

    @property
    def note(self) -> str:
        return "" if self.missing is None else str(self.missing)


@dataclass(frozen=True)
class Gains:
    """What a stage contributes, as ratios of throughputs; None if a variant was not measured."""

    stage: str
    alone: Ratio | None  # plain PyTorch with only this stage, over plain PyTorch
    in_turn: Ratio | None  # with the stages up to this one, over those before it
    last: Ratio | None  # the full pipeline, over the full pipeline without this stage


@dataclass(frozen=True, repr=False)
class LedgerData:
    """The measurements of a ledger.

    Attributes:
        rounds: the raw measurements: per round, a mapping from variants to trials. Every round has the same variants,
            plain PyTorch first.
        facts: what was measured and where, as JSON types: `recipe`, `plan`, `asked` (the pipeline's `loader`,
            `precision` and `compile`), `batch_size`, `batches_per_trial`, `seconds`, `seconds_asked`, `provenance`.
        variants: all variants, measured or not, in the order of a round.
        stopped: why measuring stopped.
        failed, left_out: the reasons why variants were not measured.
        costs: the known costs by variant.
        missing_costs: costs that were not measured, in words, with the reasons.
        notes: additional caveats.
        accuracy: the training runs, if requested.
        level: confidence level of the intervals.
    """

    rounds: Sequence[Mapping[VariantId, Trial]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    variants: Sequence[VariantId] = ()
    stopped: str = ""
    failed: Mapping[VariantId, str] = field(default_factory=dict)
    left_out: Mapping[VariantId, str] = field(default_factory=dict)
    costs: Mapping[VariantId, Costs] = field(default_factory=dict)
    missing_costs: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    accuracy: Accuracies | None = None
    level: float = LEVEL

    def __post_init__(self) -> None:
        trained = () if self.accuracy is None else self.accuracy.rows
        known = (*self.variants, *self.rounds[0], *self.failed, *self.left_out, *self.costs, *trained)
        object.__setattr__(self, "rounds", tuple(map(dict, self.rounds)))
        object.__setattr__(self, "variants", tuple(dict.fromkeys(known)))
        object.__setattr__(self, "notes", tuple(self.notes))

    @cached_property
    def levels(self) -> Levels[VariantId]:
        return Levels([{one: trial.speed for one, trial in trials.items()} for trials in self.rounds])

    @property
    def in_turn(self) -> list[VariantId]:
        """The variants of the rows, plain PyTorch first and the full pipeline last, measured or not."""
        return [one for one in self.variants if one.is_row]

    def measured(self, one: VariantId) -> bool:
        return one in self.rounds[0]

    def why_not(self, one: VariantId) -> Missing | None:
        """Return why a variant was not measured; None if it was, or if the reason is unknown."""
        if one in self.failed:
            return Missing("failed", self.failed[one])
        return Missing("left out", self.left_out[one]) if one in self.left_out else None

    @property
    def rows(self) -> list[Row]:
        """The rows of the main table, plain PyTorch first, the full pipeline last."""
        return [
            Row(one, self.speed(one) if self.measured(one) else None, self._ratio(one, PLAIN),
                self._ratio(one, before), self.why_not(one))
            for before, one in pairwise([PLAIN, *self.in_turn])
        ]  # fmt: skip

    def speed(self, one: VariantId) -> Figure:
        """Return a variant's images/s."""
        return self.levels.speed(one)

    def ratio(self, one: VariantId, over: VariantId) -> Ratio:
        """Return a variant's throughput over another's, taken within rounds."""
        return self.levels.ratio(one, over, self.level)

    def _ratio(self, one: VariantId, over: VariantId) -> Ratio | None:
        return self.ratio(one, over) if self.measured(one) and self.measured(over) else None

    @property
    def whole(self) -> VariantId:
        """The full pipeline; it may have failed, see `measured`."""
        return self.in_turn[-1]

    @property
    def stages(self) -> list[Gains]:
        """What each stage contributes: alone, added in turn, and added last."""
        return [
            Gains(one.stage, self._ratio(self.id_of_only(one.stage), PLAIN), self._ratio(one, before),
                  self._ratio(self.whole, self.id_of_without(one.stage)))
            for before, one in pairwise(self.in_turn)
        ]  # fmt: skip

    def id_of_only(self, stage: str) -> VariantId:
        """Return the variant with only this stage, which may be the first in turn."""
        first = self.in_turn[1]
        return first if first.stage == stage else only(stage)

    def id_of_without(self, stage: str) -> VariantId:
        """Return the full pipeline without this stage, which may be the last but one in turn."""
        rows = self.in_turn
        if rows[-1].stage == stage:
            return rows[-2]
        # With two stages, the full pipeline without the first is the second alone.
        return only(rows[2].stage) if len(rows) == 3 else without(stage)

    @property
    def ceilings(self) -> dict[VariantId, Figure]:
        """Throughput in images/s of the loader without a model, of the model without a loader, and of the copies to the
        device, if any."""
        return {one: self.speed(one) for one in CEILINGS if self.measured(one)}

    @property
    def waiting(self) -> float | None:
        """Fraction of the full pipeline's time spent waiting for data, 0 to 1, the median; None if not measured."""
        if not self.measured(self.whole):
            return None
        fractions = [trials[self.whole].waited / trials[self.whole].seconds for trials in self.rounds]
        return float(np.median(fractions))

    @property
    def time_breakdown(self) -> dict[str, float]:
        """Fractions of the full pipeline's time, 0 to 1: waiting for data; batch transforms, forward, loss, backward,
        step and hooks; other, which is the loop. Means over separate trials that synchronize the GPU after each phase;
        empty if not measured."""
        if SPLIT not in self.rounds[0]:
            return {}
        trials = [trials[SPLIT] for trials in self.rounds]
        seconds = sum(trial.seconds for trial in trials)
        shares = {"waiting": sum(trial.waited for trial in trials) / seconds}
        for part in PARTS:
            if part in (trials[0].parts or {}):
                shares[part] = sum((trial.parts or {}).get(part, 0.0) for trial in trials) / seconds
        return shares | {"other": max(1 - sum(shares.values()), 0.0)}

    @property
    def model_without_additions(self) -> float | None:
        """Throughput in images/s of the model alone without batch transforms, loss and hooks, from their fraction of
        the time; None if it was not measured, or they take less than a tenth."""
        shares = self.time_breakdown
        added = sum(shares.get(one, 0.0) for one in ADDED) / max(1 - shares.get("waiting", 0.0), 1e-9)
        if not self.measured(MODEL) or not 0.1 <= added < 1:
            return None
        return self.speed(MODEL).value / (1 - added)

    @property
    def extras(self) -> Ratio | None:
        """Time of the full pipeline with the extras of `fit` (progress bar, CSV log, guard against non-finite losses),
        over its time without: 1.004 for an overhead of 0.4 %. None if not measured."""
        return self._ratio(self.whole, EXTRAS)

    @property
    def extras_share(self) -> float | None:
        """Fraction of training time spent in the extras' own code, 0 to 1; None if not measured. Timed inside trials
        that have them, it is far more precise than `extras`, which includes what they slow down elsewhere. It is an
        upper bound: a short trial logs and draws once; `fit` logs every 50 steps, and draws twice a second."""
        trials = [trials[EXTRAS] for trials in self.rounds if EXTRAS in trials]
        if not trials or not all(trial.parts for trial in trials):
            return None
        return sum((trial.parts or {})["extras"] for trial in trials) / sum(trial.seconds for trial in trials)

    @property
    def others(self) -> dict[VariantId, Ratio]:
        """Throughput with another loader over that with the pipeline's own: full pipeline, and loader alone."""
        own = {"other": self.whole, "other_alone": LOADER}
        ratios = {one: self._ratio(one, own[one.kind]) for one in self.variants if one.kind in own}
        return {one: ratio for one, ratio in ratios.items() if ratio is not None}

    def ratios(self) -> dict[str, Ratio]:
        named: dict[str, Ratio | None] = {row.name: row.ratio for row in self.rows}
        for stage in self.stages:
            named[f"{stage.stage} alone"] = stage.alone
            named[f"{stage.stage} in turn"] = stage.in_turn
            named[f"{stage.stage} last"] = stage.last
        named["fit's extras"] = self.extras
        named |= {str(one): ratio for one, ratio in self.others.items()}
        return {name: one for name, one in named.items() if one is not None}

    @property
    def spread(self) -> float:
        """The widest interval of `ratios`: 0.02 for ± 2 %."""
        return max(one.spread for one in self.ratios().values())
