"""The result of a race: every run with its evaluations, as table, picture and file, which a second call continues."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

from msgspec import Struct

from ....common.errors import DrivetrainError, LedgerError
from ....common.pictures import displayed, save_result
from ....common.storage.json_files import ShapeError, finite, parse
from ....common.table import Printed, Table
from ...ledger.statistics import LEVEL, Figure, Ratio, interval_of_mean, ratio
from ...runs.facts import check_facts
from ...telemetry.history import Monitor

FORMAT = 1


class Point(NamedTuple):
    """An evaluation."""

    seconds: float  # of training until then, without evaluations
    images: int  # trained on until then, over all ranks
    accuracy: float  # the monitored metric of the task, 0 to 1


@dataclass(frozen=True)
class RaceRun:
    """One run of a race.

    Attributes:
        variant: its name.
        seed: of weights, order and augmentation.
        points: its evaluations.
        wall: seconds of the full run, with building, compiling and evaluating.
        limit: seconds of training after which it was stopped by the race's rule; None if it was not.
        stopped: why a callback ended it early, the race's included; "" if none did.
        failed: the reason of an error; "" without.
        resumed: how often it was continued after an interrupt; its seconds include as many more starts.
        undefined: whether the metric had no value in its last evaluation, which counts as no final accuracy.
    """

    variant: str
    seed: int
    points: tuple[Point, ...] = ()
    wall: float = 0.0
    limit: float | None = None
    stopped: str = ""
    failed: str = ""
    resumed: int = 0
    undefined: bool = False

    def seconds_to(self, target: float, monitor: Monitor) -> float | None:
        """Return the seconds of training until the first evaluation that reaches the target; None if none does. That of
        the moment in which the race stops a run, after its limit, does not count."""
        limit = math.inf if self.limit is None else self.limit
        times = (one.seconds for one in self.points if monitor.reaches(one.accuracy, target))
        return next((seconds for seconds in times if seconds <= limit), None)


@dataclass(frozen=True)
class RaceRow:
    """What the runs of one variant show.

    Attributes:
        variant: its name.
        runs: how many are finished: one per seed.
        reached: how many of them reached the target.
        seconds: of training to the target: the median, in which a run that did not reach it is later than all that did,
            and the interval of the typical time, the mean of the logarithms, from five runs on without a fifth at each
            end. It is unbounded unless all reached it; None unless more than half did.
        accuracy: after the last epoch: mean and interval over the runs that the race did not stop; None without one.
        ratio: its time to the target over that of the first variant, from pairs of the same seed; None unless both
            reached it from every seed that both have.
    """

    variant: str
    runs: int
    reached: int
    seconds: Figure | None
    accuracy: Figure | None
    ratio: Ratio | None


@dataclass(frozen=True, repr=False)
class RaceResult(Printed):
    """The result of `Pipeline.race`; it prints as a table.

    Attributes:
        target: the accuracy, 0 to 1.
        variants: their names, the first is the pipeline itself.
        runs: those that ended, in their order; an unfinished one is not among them, but in a folder next to the file.
        monitor: the metric that is raced for.
        give_up: a run is stopped that takes this many times as long as the fastest; None: none is.
        facts: options, machine and versions.
        stopped: why the race ended.
        provenance: date, command, revision, hardware and versions of the last call.

    Example::

        >>> race = pipeline.race(target=0.5, seeds=1, against=[], epochs=1, progress=False)
        >>> race.save("race.json")
        >>> RaceResult.load("race.json").rows == race.rows
        True
    """

    target: float
    variants: Sequence[str]
    runs: Sequence[RaceRun]
    monitor: Monitor = field(default_factory=Monitor)
    give_up: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    stopped: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def rows(self) -> list[RaceRow]:
        """A row per variant, the pipeline's first."""
        return [self._row(name) for name in self.variants]

    def of(self, variant: str) -> list[RaceRun]:
        """Return the runs of a variant, by seed."""
        return sorted((run for run in self.runs if run.variant == variant), key=lambda run: run.seed)

    def limit(self, seed: int) -> float | None:
        """Return the seconds of training after which a run of this seed is hopeless; None: unknown."""
        best: dict[int, float] = {}
        for run in self.runs:
            if (time := run.seconds_to(self.target, self.monitor)) is not None:
                best[run.seed] = min(time, best.get(run.seed, time))
        if self.give_up is None or not best:
            return None
        return self.give_up * best.get(seed, max(best.values()))

    def _times(self, variant: str) -> dict[int, float]:
        """By seed; infinite if the target was not reached."""
        times = {run.seed: run.seconds_to(self.target, self.monitor) for run in self.of(variant)}
        return {seed: math.inf if time is None else time for seed, time in times.items()}

    def _row(self, variant: str) -> RaceRow:
        runs, times, first = self.of(variant), self._times(variant), self._times(self.variants[0])
        known, reached = list(times.values()), [time for time in times.values() if time < math.inf]
        seconds = None
        if 2 * len(reached) > len(known):
            typical = ratio(known) if len(reached) == len(known) else Ratio(0, 0, math.inf, len(known))
            seconds = Figure(median(known), typical.low, typical.high, len(known))
        ended = [run for run in runs if run.points and run.limit is None and not run.undefined]
        pairs = [(times[seed], first[seed]) for seed in times if seed in first]
        paired = bool(pairs) and all(max(pair) < math.inf for pair in pairs)
        return RaceRow(
            variant, len(runs), len(reached), seconds,
            interval_of_mean([run.points[-1].accuracy for run in ended]) if ended else None,
            ratio([own / other for own, other in pairs]) if paired else None,
        )  # fmt: skip

    @property
    def rule(self) -> str:
        """The rule by which hopeless runs are stopped, as a sentence."""
        if self.give_up is None:
            return "No run is stopped early."
        return (
            f"A run that has trained {self.give_up:g} times as long as the fastest variant so far needed on the same "
            "seed (before one has reached the target there: as it needed on the slowest of the other seeds), without "
            "reaching the target, is stopped at its next evaluation and counts as not reached."
        )

    def _sentences(self) -> list[str]:
        sentences = [
            "Seconds are of training without evaluations, up to the first evaluation that reaches the target: their "
            "median, in which a run that does not reach it is later than all others, and the "
            f"{LEVEL:.0%} interval of the typical time. Time over the first: from pairs of the same seed.",
            self.rule,
        ]
        for run in self.runs:
            if run.failed:
                sentences.append(f"{run.variant}, seed {run.seed}, failed: {run.failed.rstrip('.')}.")
            elif run.limit is not None:
                # Without a point, its metric was not defined in any evaluation.
                after = f" after {seconds_text(run.points[-1].seconds)} s" if run.points else ""
                limit = seconds_text(run.limit)
                sentences.append(f"{run.variant}, seed {run.seed}, was stopped{after}: its limit was {limit} s.")
            elif run.stopped:
                sentences.append(f"{run.variant}, seed {run.seed}, ended early: {run.stopped}.")
            if run.undefined:
                sentences.append(f"{run.variant}, seed {run.seed}: {self.monitor} has no value in its last evaluation.")
            if run.resumed:
                sentences.append(
                    f"{run.variant}, seed {run.seed}, was continued after {run.resumed} interrupt(s): its seconds "
                    "include as many more starts."
                )
        return [*sentences, *filter(None, [self.stopped])]

    def _table(self) -> Table:
        target = f"{self.target:.2%}"
        rows = [
            (
                row.variant, f"{row.reached} of {row.runs}", _time(row), _accuracy(row.accuracy),
                _ratio(row.ratio, first=row.variant == self.variants[0]),
            )
            for row in self.rows
        ]  # fmt: skip
        heads = ("", "reached it", f"seconds to {target}", f"final {self.monitor}", "time over the first")
        return Table(heads, rows, f"A race to {self.monitor} {target}", figures=True)

    def _content(self) -> tuple[list[Table], list[str]]:
        return [self._table()], self._sentences()

    def show(self) -> Any:
        """Return the picture, which a notebook displays: a matplotlib figure of accuracy over seconds of training, with
        a point for every evaluation and a line through the medians of each variant.

        Raises:
            DrivetrainError: if there is no evaluation yet.
            MissingExtra: without matplotlib.
        """
        from .picture import figure_of

        if not any(run.points for run in self.runs):
            raise DrivetrainError("No run has been evaluated yet, so there is no picture.")
        return displayed(figure_of(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the race as plain JSON types: all runs, and the rows that follow from them, in which None stands for
        an unbounded end of an interval."""
        rows = [finite(asdict(row)) for row in self.rows]
        return {
            "format": FORMAT, "target": self.target, "monitor": asdict(self.monitor), "give_up": self.give_up,
            "variants": list(self.variants), "rows": rows, "stopped": self.stopped, "facts": dict(self.facts),
            "runs": [asdict(run) for run in self.runs], "provenance": dict(self.provenance),
        }  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the race (`.json`) or its picture (`.png`, `.svg`, `.pdf`); atomically.

        Raises:
            DrivetrainError: for another suffix, or a picture without an evaluation.
            MissingExtra: for a picture, without matplotlib.
        """
        save_result(self, path, dpi=150, bbox_inches="tight")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a race that `save` wrote as JSON.

        Raises:
            LedgerError: if the file does not exist, or is not a race.
        """
        try:
            saved = parse(Path(path).read_bytes(), _File)
            if saved.format != FORMAT:
                raise ShapeError(f"its format is {saved.format}, and this version reads {FORMAT}")
        except (OSError, ShapeError) as error:
            raise LedgerError(f"{path} is not the file of a race: {error}. Pass another name, or delete it.") from None
        return cls(
            saved.target, tuple(saved.variants), saved.runs, saved.monitor, saved.give_up, saved.facts, saved.stopped,
            saved.provenance,
        )  # fmt: skip


class _File(Struct):
    format: int
    target: float
    monitor: Monitor
    give_up: float | None
    variants: list[str]
    runs: list[RaceRun]
    facts: dict[str, Any]
    stopped: str = ""
    provenance: dict[str, Any] = {}  # msgspec copies it for each


def read_runs(path: Path, facts: Mapping[str, Any]) -> list[RaceRun]:
    """Return the saved runs, without those that failed; LedgerError if they are of other options or another machine."""
    if not path.exists():
        return []
    saved = RaceResult.load(path)
    check_facts(path, saved.facts, facts)
    return [run for run in saved.runs if not run.failed]


class RaceInterrupted(KeyboardInterrupt):
    """Ctrl-C during `Pipeline.race`. `race` has the runs that had ended."""

    def __init__(self, race: RaceResult) -> None:
        super().__init__(f"the race was interrupted after {len(race.runs)} run(s), which its `race` contains")
        self.race = race

    def __reduce__(self) -> Any:
        return type(self), (self.race,)


def _time(row: RaceRow) -> str:
    if row.seconds is None:
        return "not reached" if row.runs else ""
    one = row.seconds
    return f"{seconds_text(one.value)}{_ends(one, seconds_text)}"


def seconds_text(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _ends(one: Figure, text: Callable[[float], str]) -> str:
    return f"  ({text(one.low)} to {text(one.high)})" if math.isfinite(one.high) else ""


def _accuracy(one: Figure | None) -> str:
    if one is None:
        return ""
    return f"{one.value:.2%}" + (f" ± {one.high - one.value:.2%}" if math.isfinite(one.high) else "")


def _ratio(one: Ratio | None, *, first: bool) -> str:
    if one is None:
        return ""
    return "1.00" if first else f"{one.value:.2f}{_ends(one, '{:.2f}'.format)}"
