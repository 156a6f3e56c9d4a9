"""Find the pipeline that reaches an accuracy first: one change after the other races the best pipeline so far, from the
same seeds in turns. A change is accepted by the same test as one of speed, `judge`, on the ratios of the seconds of
training to the target; and dropped as soon as one of its runs does not reach it, or, trained after the best of
its pair, takes `GIVE_UP` times as long.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from ....common.budget import OutOfTime, rounded_up
from ....common.errors import DataError, DrivetrainError, PlanError
from ...describe.pipeline_spec import PipelineSpec
from ...describe.resolve import resolve
from ...ledger.statistics import judge
from ..race.race import race
from ..race.result import RaceResult
from .candidates import Candidate, untried
from .result import Outcome, Tried, Tuned

# Numbers of pairs of runs after which the test may end: more would take days where a run takes hours. None is trimmed:
# a run averages the machine's speed over its length.
PAIRS = (4, 5, 6, 8)
GIVE_UP = 1.5


class TargetTuner:
    """The search. `known` are the trials of an earlier call."""

    def __init__(
        self, spec: PipelineSpec, target: float, changes: list[Candidate], facts: dict[str, Any],
        known: Sequence[Tried], end: float, show: Callable[[str], None],
        save: Callable[[Tuned], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._spec, self._target, self._changes, self._facts = spec, target, changes, facts
        self._known, self._end, self._show, self._save = {one.name: one for one in known}, end, show, save
        self._trials: list[Tried] = []
        self._longest = 0.0  # seconds of a run
        self.stopped = ""  # why it ended
        self.complete = False  # whether every change was tried
        self.untried = "no time was left"  # why changes that are left were not tried

    def run(self) -> None:
        """Try all changes. Raise OutOfTime, and PlanError if the pipeline as given does not reach the target."""
        for candidate in self._changes:
            if (known := self._known.get(candidate.name)) is not None:
                self._trials.append(known)
                if known.outcome == "accepted":
                    self._spec = candidate.change(self._spec)
                continue
            self._trials += untried([candidate], [], "the tuning ended before there was a verdict")
            try:
                spec = candidate.change(self._spec)
                resolve(spec)
                accepted = self._try(candidate.name, spec)
            except (DataError, PlanError) as error:  # this change and the pipeline do not go together
                self._note("failed", str(error))
                continue
            except _UnreachedError as error:
                self._trials.pop()
                if not any(one.rounds for one in self._trials):
                    raise PlanError(str(error)) from None
                self.stopped = str(error)  # what is known is kept
                self.untried = "the search ended before it"
                return
            if accepted:
                self._spec = spec
            self._save(self.result())
        self.stopped, self.complete = "Every change was tried.", True

    def _try(self, name: str, spec: PipelineSpec) -> bool:
        with TemporaryDirectory(prefix="drivetrain-tune-") as folder:
            file = Path(folder, "race.json")
            for pairs in range(1, PAIRS[-1] + 1):
                self._show(f"{name}: runs from seed {self._spec.seed + pairs - 1}")
                try:
                    found = self._race(name, spec, pairs, file)
                except (DataError, PlanError) as error:
                    if file.exists():
                        raise
                    # No run has ended: the first one, which is of the best pipeline, cannot begin.
                    raise _UnreachedError(f"Without {name}, the pipeline cannot be trained: {error}") from None
                self._trials[-1] = judged(self._trials[-1], found)
                if self._trials[-1].outcome != "undecided":
                    return self._trials[-1].outcome == "accepted"
        self._note("dropped", f"no verdict after {PAIRS[-1]} rounds")
        return False

    def _race(self, name: str, spec: PipelineSpec, pairs: int, file: Path) -> RaceResult:
        """Race one pair more than the file has. One that ends after the budget counts, too: it may take hours."""
        if perf_counter() >= self._end:
            raise OutOfTime
        found = race(
            self._spec, target=self._target, seeds=pairs, against={name: spec}, epochs=None, give_up=GIVE_UP,
            seconds=None, out=file, progress=False, paired=True,
        )  # fmt: skip
        self._longest = max(self._longest, *(run.wall for run in found.runs), 0.0)
        return found

    def _note(self, outcome: Outcome, reason: str) -> None:
        self._trials[-1] = replace(self._trials[-1], outcome=outcome, reason=reason)

    def too_short(self, seconds: float) -> str:
        if any(one.outcome in ("accepted", "dropped") for one in self._trials):
            return ""
        needed = 4 * seconds if not self._longest else 2 * PAIRS[-1] * self._longest
        return f" No change has a verdict: pass about {rounded_up(max(needed, 2 * seconds)):g} s (--seconds)."

    def close(self) -> None:
        """There is nothing to close: each race ends what it starts."""

    def result(self) -> Tuned:
        left = untried(self._changes, self._trials, self.untried)
        return Tuned(self._spec, [*self._trials, *left], facts=self._facts, stopped=self.stopped, target=self._target)


def judged(trial: Tried, found: RaceResult) -> Tried:
    """Return the trial with the verdict on the change after these pairs of runs: the best pipeline's, and its own."""
    best, own = (found.of(name) for name in found.variants)
    times, others = ([run.seconds_to(found.target, found.monitor) for run in runs] for runs in (own, best))
    if None in others:
        short = best[others.index(None)]
        if short.failed:  # neither another target nor more epochs would help
            raise _UnreachedError(f"Without {trial.name}, the pipeline fails from seed {short.seed}: {short.failed}")
        best_of = max if found.monitor.higher_is_better else min
        top = best_of((point.accuracy for point in short.points), default=0.0)
        raise _UnreachedError(
            f"target={found.target:g}: without {trial.name}, seed {short.seed} reaches {top:.2%}. "
            "Pass a lower target, or more epochs."
        )
    if None in times:
        run = own[times.index(None)]
        limit = f"within {GIVE_UP:g} times the time of the best" if run.limit is not None else "at all"
        reason = run.failed or f"seed {run.seed} does not reach the target {limit}"
        return replace(trial, outcome="dropped", reason=reason, rounds=len(own))
    ratios = [other / time for other, time in zip(others, times, strict=True) if other and time]
    verdict, interval = judge(ratios, looks=PAIRS, trim=0)
    low, high = (interval.low, interval.high) if interval.n > 1 else (None, None)
    return replace(trial, outcome=verdict, reason="", rounds=interval.n, ratio=interval.value, low=low, high=high)


class _UnreachedError(DrivetrainError):
    """The best pipeline so far does not reach the target."""
