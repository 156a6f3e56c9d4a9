"""Find the fastest way to run a training on this machine: one change after the other, each tested against the best.

A change and the best pipeline so far are trained in turns, on the same samples. It is accepted as soon as the
confidence interval of the ratio excludes 1, and dropped as soon as it excludes a gain; see `sequential`. What the
ceilings say binds is tried first. Only changes that keep what the training computes are tried; see `candidates`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Generic

from ...errors import DrivetrainError, PlanError
from ..ledger.budget import Budget, OutOfTime, alarm
from ..ledger.measure import check_asked
from ..spec.pipeline_spec import PipelineSpec
from ..spec.resolve import ResolvedPlan, resolve
from ..telemetry.provenance import provenance
from ..training.build import fork_rng, resolve_data
from .arena import Arena, C, Failed, Trials, is_out_of_memory
from .candidates import Binds, Candidate, candidates, fitting, ordered
from .result import Tried, Tuned, TuneInterrupted, read_trials
from .sequential import LOOKS, judge

SHARE = 1 / 100
"""Part of the budget that a trial takes at most: with two pipelines, a change can have all its rounds in half of it."""


def tune(
    spec: PipelineSpec, *, seconds: float = 600.0, out: str | Path | None = None, progress: bool = True
) -> Tuned:
    """Tune a pipeline; see `Pipeline.tune`."""
    check_asked(seconds)
    begin = perf_counter()
    plan = resolve_data(resolve(spec), progress)
    facts = machine_facts(plan)
    file = None if out is None else Path(out)
    if file is not None and file.suffix != ".json":
        raise PlanError(
            f"out={str(out)!r} must end in .json: it keeps the trials, from which the next call goes on."
        )
    known = [] if file is None else read_trials(file, facts)
    budget = Budget(seconds, begin, progress)
    arena = Trials(budget.end, seconds * SHARE)
    tuner = Tuner(spec, arena, candidates(plan), fitting(plan), facts, known, budget.show)
    interrupted = False
    try:
        with fork_rng(plan.seed), alarm(budget.end):
            tuner.run()
    except OutOfTime:
        tuner.stopped = f"Stopped at the {seconds:g} s budget."
    except KeyboardInterrupt:
        interrupted = True
        tuner.stopped = "Interrupted (Ctrl-C)."
    finally:
        tuner.close()
        budget.close()
    tuned = tuner.result()
    if file is not None:
        tuned.save(file)
    if interrupted:
        raise TuneInterrupted(tuned)
    return tuned


def machine_facts(plan: ResolvedPlan) -> dict[str, Any]:
    """Return what the trials hold for: the training, the machine and the versions."""
    known = provenance()
    return {
        "recipe": plan.recipe,
        "model": plan.spec.model_name,
        "data": str(plan.data.train),
        "batch_size": plan.data.batch_size,
        "image_size": plan.data.image_size,
        "hardware": known["hardware"],
        "versions": known["versions"],
    }


class Tuner(Generic[C]):
    """The search, apart from how pipelines are measured.

    Args:
        spec: the pipeline as given.
        arena: measures.
        changes: to try.
        fitting: to try first, one after the other, if the pipeline does not fit into memory.
        facts: kept in the result.
        known: trials of an earlier call: their changes are not tried again.
        show: receives what is being done.

    Attributes:
        stopped: why it ended.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        arena: Arena[C],
        changes: list[Candidate],
        fitting: list[Candidate],
        facts: dict[str, Any],
        known: list[Tried] | None = None,
        show: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._spec, self._arena, self._changes, self._fitting = spec, arena, changes, fitting
        self._facts, self._known, self._show = facts, known or [], show
        self._trials: list[Tried] = []
        self._best: C | None = None
        self._stack = ExitStack()
        self._before: float | None = None
        self._limits: dict[str, float] = {}
        self._number = 0
        self.stopped = ""

    def run(self) -> None:
        """Try all changes.

        Raises:
            OutOfTime: at the deadline.
            DrivetrainError: if the pipeline as given cannot be trained.
        """
        self._recall()
        self._best = self._first()
        self._measure_limits()
        self._before = self._before or self._limits.get("training")
        bound: Binds = "data" if self._limits["loader"] < self._limits["model"] else "step"
        left = [one for one in self._changes if all(one.name != tried.name for tried in self._trials)]
        for candidate in ordered(left, bound):
            self._try(candidate)
        if any(one.outcome == "accepted" for one in self._trials):
            self._measure_limits()
        self.stopped = "Every change was tried."

    def _recall(self) -> None:
        """Take over the trials of an earlier call."""
        for tried in self._known:
            candidate = next(
                (one for one in (*self._fitting, *self._changes) if one.name == tried.name), None
            )
            if candidate is None:
                continue
            self._trials.append(tried)
            if tried.outcome == "accepted":
                self._spec = candidate.change(self._spec)

    def _first(self) -> C:
        """Build the pipeline as given, or with what makes it fit into memory."""
        reason, spec = "", self._spec
        for candidate in (None, *self._fitting):
            name = "as given" if candidate is None else candidate.name
            self._show(name)
            spec = self._spec if candidate is None else candidate.change(self._spec)
            try:
                contender = self._arena.open(name, spec)
            except Failed as failure:
                reason = str(failure)
                if candidate is not None:
                    self._trials.append(Tried(candidate.name, candidate.binds, "failed", reason=reason))
                if not is_out_of_memory(reason):
                    raise PlanError(
                        f"The pipeline cannot be trained, so it cannot be tuned: {reason}"
                    ) from None
                continue
            if candidate is not None:
                why = "the pipeline does not fit into memory without it"
                self._trials.append(Tried(candidate.name, candidate.binds, "accepted", reason=why))
            self._spec = spec
            return contender
        raise PlanError(f"The pipeline fits into memory with no number of microbatches: {reason}")

    def _measure_limits(self) -> None:
        assert self._best is not None
        self._show("what binds")
        try:
            self._limits = self._arena.limits(self._best)
        except Failed as failure:
            raise PlanError(f"The pipeline cannot be trained, so it cannot be tuned: {failure}") from None

    def _try(self, candidate: Candidate) -> None:
        """Test a change against the best pipeline."""
        assert self._best is not None
        tried = Tried(candidate.name, candidate.binds, "failed")
        self._show(candidate.name)
        try:
            spec = candidate.change(self._spec)
            resolve(spec)
            contender = self._arena.open(candidate.name, spec)
        except (Failed, DrivetrainError) as error:
            self._trials.append(replace(tried, reason=str(error)))
            return
        keep = False
        try:
            tried = self._compare(contender, tried)
            keep = tried.outcome == "accepted"
        except Failed as failure:
            tried = replace(tried, reason=str(failure))
        except OutOfTime:
            tried = replace(tried, outcome="not tried", reason="the time was over before there was a verdict")
            raise
        finally:
            self._trials.append(tried)
            if keep:
                self._best.close()
                self._best, self._spec = contender, spec
            else:
                contender.close()

    def _compare(self, contender: C, tried: Tried) -> Tried:
        """Run rounds until there is a verdict."""
        assert self._best is not None
        ratios: list[float] = []
        speeds: list[float] = []
        while len(ratios) < LOOKS[-1]:
            self._number += 1
            own, other = self._arena.round(self._number, [contender, self._best])
            ratios.append(own / other)
            speeds.append(own)
            verdict, found = judge(ratios)
            if verdict != "undecided":
                break
        return replace(
            tried,
            outcome="accepted" if verdict == "accepted" else "dropped",
            ratio=found.value, low=found.low, high=found.high, rounds=found.n,
            images_per_s=sorted(speeds)[len(speeds) // 2],
        )  # fmt: skip

    def close(self) -> None:
        """Release the best pipeline's model and loaders."""
        if self._best is not None:
            self._best.close()

    def result(self) -> Tuned:
        """Return what was found so far."""
        names = {one.name for one in self._trials}
        left = [
            Tried(one.name, one.binds, "not tried", reason="no time was left")
            for one in self._changes
            if one.name not in names
        ]
        return Tuned(
            self._spec, [*self._trials, *left], self._limits, self._before, self._facts, self.stopped
        )
