"""Find the pipeline that reaches an accuracy first: one change after the other races the best pipeline so far, from the
same seeds in turns. A change is accepted by the same test as one of speed, `judge`, on the ratios of the seconds of
training to the target; and dropped as soon as one of its runs does not reach it, or takes `GIVE_UP` times as long.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from ...common.budget import OutOfTime, rounded_up
from ...common.errors import DataError, DrivetrainError, PlanError
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import resolve
from ..measuring.statistics import judge
from ..race.race import race
from ..race.result import RaceResult
from .candidates import Candidate
from .result import Outcome, Tried, Tuned

PAIRS = 8  # of runs for a change, at most: more would take days where a run takes hours
GIVE_UP = 1.5


class TargetTuner:
    """The search. `known` are the trials of an earlier call."""

    def __init__(
        self, spec: PipelineSpec, target: float, changes: list[Candidate], facts: dict[str, Any],
        known: Sequence[Tried], end: float, show: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._spec, self._target, self._changes, self._facts = spec, target, changes, facts
        self._known, self._end, self._show = {one.name: one for one in known}, end, show
        self._trials: list[Tried] = []
        self._longest = 0.0  # seconds of a run
        self.stopped = ""  # why it ended

    def run(self) -> None:
        """Try all changes. Raise OutOfTime, and PlanError if the pipeline as given does not reach the target."""
        for candidate in self._changes:
            if (known := self._known.get(candidate.name)) is not None:
                self._trials.append(known)
                if known.outcome == "accepted":
                    self._spec = candidate.change(self._spec)
                continue
            self._trials.append(
                Tried(candidate.name, candidate.bottleneck, "not tried", reason="no time was left")
            )
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
                return
            if accepted:
                self._spec = spec
        self.stopped = "Every change was tried."

    def _try(self, name: str, spec: PipelineSpec) -> bool:
        with TemporaryDirectory(prefix="drivetrain-tune-") as folder:
            for pairs in range(1, PAIRS + 1):
                self._show(f"{name}: runs from seed {self._spec.seed + pairs - 1}")
                verdict = self._judged(self._race(name, spec, pairs, Path(folder, "race.json")), pairs)
                if verdict is not None:
                    return verdict
        self._note("dropped", f"no verdict after {PAIRS} rounds", PAIRS)
        return False

    def _race(self, name: str, spec: PipelineSpec, pairs: int, file: Path) -> RaceResult:
        """Race one pair more than the file has."""
        found = race(
            self._spec, target=self._target, seeds=pairs, against={name: spec}, epochs=None, give_up=GIVE_UP,
            seconds=None, out=file, progress=False,
        )  # fmt: skip
        self._longest = max(self._longest, *(run.wall for run in found.runs), 0.0)
        if perf_counter() >= self._end:
            raise OutOfTime
        return found

    def _judged(self, found: RaceResult, pairs: int) -> bool | None:
        """Return whether the change is accepted; None: that takes more runs."""
        best, own = found.rows
        if best.reached < pairs:
            top = max((point.accuracy for run in found.of(best.variant) for point in run.points), default=0.0)
            raise _UnreachedError(
                f"target={self._target:g}: the pipeline itself reaches {top:.2%} from the seeds until "
                f"{self._spec.seed + pairs - 1}. Pass a lower target, or more epochs."
            )
        if own.reached < pairs:
            run = found.of(own.variant)[-1]
            limit = f"within {GIVE_UP:g} times the time of the best" if run.limit is not None else "at all"
            self._note("dropped", run.failed or f"seed {run.seed} does not reach the target {limit}", pairs)
            return False
        times = {run.seed: run.seconds_to(self._target, found.monitor) for run in found.of(own.variant)}
        ratios = [
            (run.seconds_to(self._target, found.monitor) or 0.0) / (times[run.seed] or 1.0)
            for run in found.of(best.variant)
        ]
        verdict, interval = judge(ratios)
        several = interval.n > 1
        self._note(
            "undecided", "", pairs, ratio=interval.value, low=interval.low if several else None,
            high=interval.high if several else None,
        )  # fmt: skip
        if verdict == "undecided":
            return None
        self._note(verdict, "", pairs)
        return verdict == "accepted"

    def _note(self, outcome: Outcome, reason: str, rounds: int = 0, **changes: Any) -> None:
        self._trials[-1] = replace(self._trials[-1], outcome=outcome, reason=reason, rounds=rounds, **changes)

    def too_short(self, seconds: float) -> str:
        if any(one.outcome in ("accepted", "dropped") for one in self._trials):
            return ""
        needed = 4 * seconds if not self._longest else 2 * PAIRS * self._longest
        return f" No change has a verdict: pass about {rounded_up(max(needed, 2 * seconds)):g} s (--seconds)."

    def close(self) -> None:
        """There is nothing to close: each race ends what it starts."""

    def result(self) -> Tuned:
        names = {one.name for one in self._trials}
        left = [
            Tried(one.name, one.bottleneck, "not tried", reason="no time was left")
            for one in self._changes
            if one.name not in names
        ]
        return Tuned(
            self._spec, [*self._trials, *left], facts=self._facts, stopped=self.stopped, target=self._target
        )


class _UnreachedError(DrivetrainError):
    """The best pipeline so far does not reach the target."""
