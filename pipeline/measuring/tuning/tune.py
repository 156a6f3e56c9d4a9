"""Find the fastest way to run a training on this machine: one change after the other is trained in turns with the best
pipeline so far, on the same samples. It is accepted as soon as the confidence interval of the ratio excludes 1, and
dropped as soon as it excludes a gain; see `judge`. Changes of what is computed must be allowed, and keep the accuracy.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from ....common.budget import Budget, OutOfTime, alarm, rounded_up
from ....common.checks import check_number
from ....common.errors import DrivetrainError, PlanError
from ....common.storage.addresses import local_path
from ....common.storage.files import make_folder
from ...describe.pipeline_spec import PipelineSpec
from ...describe.resolve import ResolvedPlan, resolve
from ...describe.rules import check_epochs, check_split_seed
from ...ledger.statistics import LOOKS, PROCESSES, SEEDS, WORTH, judge, judge_accuracy
from ...runs.facts import facts_of, options_of
from ...tasks.scales import check_comparable
from ...training.build import fork_rng, plain_torch, resolve_data
from ..runner import Failed, check_measurable
from .arena import LIMIT_ROUNDS, Arena, Contender, is_out_of_memory
from .candidates import (
    Bottleneck,
    Candidate,
    allowed,
    between,
    candidates,
    fitting,
    ordered,
    place,
    remembered,
    to_target,
    untried,
)
from .kept import Kept, Results, lock_tuning
from .result import Outcome, Tried, Tuned, TuneInterrupted, read_trials
from .storage import may_be_tried
from .to_target import TargetTuner

# Of the budget, at most for a trial: with two pipelines, a change can have all its rounds in half of it.
SHARE = 1 / 100
PROBE_SECONDS = 60.0  # from here on, the first pipeline is tried in a process of its own; see `Arena`
# Why a batch size larger than one with this outcome is not tried.
WHY_NOT = {"failed": "failed", "dropped": "is not faster", "trade": "is not shown to keep the accuracy"}
WORTH_CONVERTING = 1.05  # a gain that can be hoped for, from which on data are converted
COMMUNICATION = 0.5  # the bottleneck, if exchanging the gradients alone takes this share of a step or more
# What may differ where a run resumes, or what the run compares itself (the data, `settings`). A precision of "auto" is
# that of the checkpoint.
MAY_CHANGE = (
    "train", "val", "data", "workers", "batches_ahead", "cache", "cache_limit", "patience", "stream",
    "strategy", "options", "devices", "accumulate", "timeout", "precision", "settings",
)  # fmt: skip


@plain_torch()
def tune(
    spec: PipelineSpec, *, seconds: float, allow: Sequence[str], epochs: int | None, target: float | None,
    out: str | Path | None, again: bool, progress: bool,
) -> Tuned:  # fmt: skip
    check_measurable(seconds)
    if epochs is not None and target is None and not allow:
        raise PlanError(
            "epochs= (--epochs) is of each short training of allow=, or of each run to target=. Pass one of them, or "
            "leave epochs out."
        )
    begin = perf_counter()
    if target is not None and epochs is not None:
        spec = spec.replace(epochs=epochs)
    plan = resolve_data(resolve(spec), progress)
    check_split_seed(plan.data)
    spec = spec.replace(distribution=plan.spec.distribution)  # its precision is decided
    if target is None:
        epochs = 1 if epochs is None else epochs
        changes = [*candidates(plan), *_allowed(plan, allow, epochs)]
    else:
        changes = _to_target(plan, allow, target)
    trained = None if target is None and not allow else epochs if target is None else plan.spec.epochs
    facts = facts_of(plan) | {"allow": sorted({*allow}), "target": target, "epochs": trained}
    file = _file(out)
    with lock_tuning(file):
        results = Results(file, facts, again=again)
        budget = Budget(seconds, begin, progress, "tune")
        if target is None:
            names = {one.name for one in changes}
            if "batch_size" in allow:
                changes += remembered(plan, (one.name for one in results.known if one.name not in names))
            place(changes, None if results.file is None else results.file.parent, budget.end)
        if (kept := results.kept) is not None and kept.answers(seconds):
            tuned = answered(spec, kept, [*changes, *fitting(plan)], facts, target)
            if tuned is not None:
                return results.write(tuned)
        tuner: Tuner | TargetTuner
        if target is None:
            arena = Arena(budget.end, seconds * SHARE, probe=seconds >= PROBE_SECONDS, epochs=epochs or 1)
            tuner = Tuner(spec, arena, changes, fitting(plan), facts, results.known, budget.show, results.save)
        else:
            tuner = TargetTuner(spec, target, changes, facts, results.known, budget.end, budget.show, results.save)
        return _search(tuner, plan, budget, results)


def _file(out: str | Path | None) -> Path | None:
    if out is None:
        return None
    file = local_path(out, "out", PlanError).absolute()
    if file.suffix != ".json":
        raise PlanError(f"out={str(out)!r} must end in .json: it keeps the trials, from which the next call continues.")
    make_folder(file.parent)  # before time is spent on what it will contain
    return file


def _search(tuner: "Tuner | TargetTuner", plan: ResolvedPlan, budget: Budget, results: Results) -> Tuned:
    spent: float | None = budget.seconds
    try:
        with budget, fork_rng(plan.seed), alarm(budget.end):
            tuner.run()
        spent = None if tuner.complete else spent
    except OutOfTime:
        tuner.stopped = f"Stopped at the {budget.seconds:g} s budget.{tuner.too_short(budget.seconds)}"
    except KeyboardInterrupt:
        tuner.stopped, spent = "Interrupted.", 0.0
        tuner.untried = "the tuning was interrupted before it"
    finally:
        tuner.close()
    tuned = results.save(tuner.result(), spent)
    if spent == 0:
        raise TuneInterrupted(tuned)
    return tuned


def answered(
    spec: PipelineSpec, kept: Kept, changes: Sequence[Candidate], facts: dict[str, Any], target: float | None
) -> Tuned | None:
    """Return what is kept as the result of this call; None if converted data have been removed, or could not be
    converted for lack of a folder, space or time, which this call may have."""
    by_name = {one.name: one for one in changes}
    for tried in kept.trials:
        candidate = by_name.get(tried.name)
        has_folder = candidate is not None and candidate.storage is not None and candidate.storage.folder is not None
        if not can_be_kept(candidate, tried) or (has_folder and may_be_tried(tried.reason)):
            return None
        if tried.outcome == "accepted":
            spec = by_name[tried.name].change(spec)
    return Tuned(spec, kept.trials, kept.limits, kept.before, facts, kept.note, kept.variables, target)


def can_be_kept(candidate: Candidate | None, tried: Tried) -> bool:
    """Whether an accepted change can be made again without a trial."""
    if tried.outcome != "accepted":
        return True
    return candidate is not None and (candidate.storage is None or candidate.storage.exists)


@plain_torch()
def recalled(spec: PipelineSpec, out: Path) -> PipelineSpec:
    """Return the pipeline with the changes of speed that a tuning accepted, by its file `out`, without a trial, perhaps
    on another machine: what a run that resumes was begun with. What a longer search accepts may be another training,
    which cannot resume it. Whether the data are the same, the run itself compares."""
    if not out.exists():
        return spec
    plan = resolve_data(resolve(spec), progress=False)
    changes = {one.name: one for one in (*candidates(plan), *fitting(plan))}
    place([*changes.values()], out.absolute().parent, perf_counter())
    facts = {name: value for name, value in options_of(plan).items() if name not in MAY_CHANGE}
    for tried in read_trials(out, facts | {"allow": [], "target": None, "epochs": None}):
        candidate = changes.get(tried.name)
        if candidate is not None and tried.outcome == "accepted" and can_be_kept(candidate, tried):
            spec = candidate.change(spec)
    return spec


def _to_target(plan: ResolvedPlan, allow: Sequence[str], target: float) -> list[Candidate]:
    _check_names(allow)
    check_number("target", target, PlanError, "(0, 1]", also=": an accuracy")
    if plan.spec.epochs is None:
        raise PlanError("Number of epochs not set. Pass tune(epochs=…) (--epochs): of each run to the target.")
    if plan.data.val is None:
        raise PlanError("target= is an accuracy, which needs validation data. Pass a second file to load() (--val).")
    check_comparable(plan.task, "target=")
    return to_target(plan, allow)


def _check_names(allow: Sequence[str]) -> None:
    if isinstance(allow, str):
        raise PlanError(f"allow={allow!r} must be a sequence of names: allow=({allow!r},).")


def _allowed(plan: ResolvedPlan, allow: Sequence[str], epochs: int) -> list[Candidate]:
    _check_names(allow)
    found = allowed(plan, allow)
    if not found:
        return []
    check_epochs(plan.spec, epochs)
    if plan.data.val is None:
        raise PlanError(
            "allow= measures the accuracy, which needs validation data. Pass a second file to load() (--val)."
        )
    check_comparable(plan.task, "allow=")
    return [replace(one, change=partial(_changed, one, epochs)) for one in found]


def _changed(candidate: Candidate, epochs: int, spec: PipelineSpec) -> PipelineSpec:
    """Return the changed pipeline; PlanError, before its speed is measured, if a short training is too short for it."""
    changed = candidate.change(spec)
    check_epochs(changed, epochs)
    return changed


class Tuner:
    """The search, apart from how pipelines are measured. `fitting` are tried first, if it does not fit into memory."""

    def __init__(
        self, spec: PipelineSpec, arena: Arena, changes: list[Candidate], fitting: list[Candidate],
        facts: dict[str, Any], known: Sequence[Tried] = (), show: Callable[[str], None] = lambda _: None,
        save: Callable[[Tuned], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._given, self._spec, self._arena = spec, spec, arena
        self._changes, self._fitting = changes, fitting
        self._facts, self._known, self._show, self._save = facts, known, show, save
        self._trials: list[Tried] = []
        self._best: Contender | None = None
        self._before: float | None = None
        self._limits: dict[str, float] = {}
        self._variables: dict[str, str] = {}
        self._accuracies: dict[int, float] = {}  # of the pipeline as given, by seed
        self._gain = 1.0  # of the changes of an earlier call
        self._trial: float | None = None  # seconds
        self._number = 0  # of the last round
        self._is_converted = False  # whether a storage format is accepted
        self._too_large: int | None = None  # the smallest batch size that does not fit into memory
        self.untried = "no time was left"  # why changes that are left were not tried
        self.stopped = ""  # why it ended
        self.complete = False  # whether every change was tried

    def run(self) -> None:
        """Try all changes. Raise OutOfTime, and DrivetrainError if the pipeline as given cannot be trained."""
        self._recall()
        self._best = self._first()
        self._measure_limits()
        self._before = self._limits["training"] / self._gain
        known = {tried.name: tried for tried in self._trials}
        left = [one for one in self._changes if one.name not in known]
        for candidate in self._changes:
            if candidate.batch_size is not None and candidate.name in known:
                left = self._sizes_left(known[candidate.name], candidate.batch_size, left)
        while left:
            candidate = ordered(left, self._bottleneck())[0]
            left.remove(candidate)
            if reason := self._pointless(candidate) or self._unconverted(candidate):
                self._add(candidate, "not tried", reason)
            elif self._try(candidate) and not candidate.variables:
                self._save(self.result())  # a kill while that is measured would lose the verdict
                self._measure_limits()  # the bottleneck may be another one now
            if candidate.batch_size is not None:
                left = self._sizes_left(self._trials[-1], candidate.batch_size, left)
            self._save(self.result())
        self.stopped, self.complete = "Every change was tried.", True

    def _pointless(self, candidate: Candidate) -> str:
        if candidate.storage is not None and self._is_converted:
            return "another storage format is accepted"
        share = self._limits["training"] / self._limits["model"]
        if candidate.storage is not None and self._bottleneck() != "data" and share > 1 / WORTH_CONVERTING:
            return (
                f"the loader is faster than the model, and training reaches {share:.0%} of the model alone: nothing is "
                f"converted for less than {WORTH_CONVERTING - 1:.0%}"
            )
        times = self._limits["loader"] / self._limits["model"]
        if candidate.bottleneck != "data" or times < 1 / (WORTH - 1):
            return ""
        return f"the loader alone is {times:,.0f} times as fast as the model: less than {WORTH - 1:.0%} to gain"

    def _unconverted(self, candidate: Candidate) -> str:
        """Convert the data that a change is trained on; return why not, or ""."""
        if candidate.storage is None:
            return ""
        self._show(f"{candidate.name}: converting")
        return candidate.storage.convert()

    def _sizes_left(self, last: Tried, size: int, left: list[Candidate]) -> list[Candidate]:
        """Return the changes left after a trial of this size: larger ones as long as each was accepted; once one does
        not fit into memory, the one in the middle between it and the largest that was accepted."""
        fits = self._spec.data
        assert fits is not None
        too_large = is_out_of_memory(last.reason) and last.outcome == "failed"
        if too_large:
            self._too_large = size
        if last.outcome == "accepted" and self._too_large is None:
            return left
        for one in left:
            if one.batch_size is not None:
                self._add(one, "not tried", f"{last.name} {WHY_NOT[last.outcome]}")
        left = [one for one in left if one.batch_size is None]
        if self._too_large is not None and (too_large or last.outcome == "accepted"):
            middle = between(resolve(self._given), fits.batch_size, self._too_large)
            tried = {one.name for one in self._trials}
            left += [] if middle is None or middle.name in tried else [middle]
        return left

    def _bottleneck(self) -> Bottleneck:
        loader, model = self._limits["loader"], self._limits["model"]
        if loader < model:
            return "data"
        share = model / self._limits["communication"] if "communication" in self._limits else 0.0
        return "communication" if share >= COMMUNICATION else "step"

    def _recall(self) -> None:
        changes = {one.name: one for one in (*self._changes, *self._fitting)}
        for tried in self._known:
            candidate = changes.get(tried.name)
            if candidate is None or not can_be_kept(candidate, tried):
                continue
            self._trials.append(tried)
            if tried.outcome == "accepted":
                self._accept(candidate, candidate.change(self._spec))
                if not candidate.variables:
                    self._gain *= tried.ratio or 1.0
                if candidate in self._fitting:
                    self._given = candidate.change(self._given)

    def _add(self, candidate: Candidate, outcome: Outcome, reason: str) -> None:
        self._trials.append(Tried(candidate.name, candidate.bottleneck, outcome, reason=reason))

    def _first(self) -> Contender:
        reason = ""
        for candidate in (None, *self._fitting):
            name = "as given" if candidate is None else candidate.name
            self._show(name)
            spec = self._spec if candidate is None else candidate.change(self._spec)
            try:
                contender = self._arena.open(name, spec)
            except Failed as failure:
                reason = str(failure)
                if candidate is not None:
                    self._add(candidate, "failed", reason)
                if not is_out_of_memory(reason):
                    raise PlanError(f"The pipeline cannot be trained, so it cannot be tuned: {reason}") from None
                continue
            except DrivetrainError as error:
                if candidate is None:
                    raise
                self._add(candidate, "failed", f"{error}")  # it does not go with this pipeline
                continue
            if candidate is not None:
                self._given = candidate.change(self._given)  # as given, it could not be trained
                self._add(candidate, "accepted", "the pipeline does not fit into memory without it")
            self._spec = spec
            return contender
        raise PlanError(f"The pipeline fits into memory with no number of microbatches: {reason}")

    def _measure_limits(self) -> None:
        assert self._best is not None
        self._show("the bottleneck")
        start = perf_counter()
        try:
            self._limits = self._arena.limits(self._best)
            self._trial = (perf_counter() - start) / (LIMIT_ROUNDS * len(self._limits))
        except Failed as failure:
            raise PlanError(f"The pipeline cannot be trained, so it cannot be tuned: {failure}") from None

    def _accept(self, candidate: Candidate, spec: PipelineSpec) -> None:
        self._spec = spec
        self._variables |= candidate.variables
        if candidate.storage is not None:
            candidate.storage.accept()
            self._is_converted = True

    def _try(self, candidate: Candidate) -> bool:
        assert self._best is not None
        self._add(candidate, "not tried", "the tuning ended before there was a verdict")
        self._show(candidate.name)
        with ExitStack() as opened:
            if candidate.storage is not None:
                opened.callback(candidate.storage.discard)
            try:
                spec = candidate.change(self._spec)
                resolve(spec)
                contender, against = self._opened(candidate, spec, opened)
                faster = self._compare(contender, against, PROCESSES if candidate.variables else 1.0)
                if faster and (not candidate.numbers or self._keeps_accuracy(spec)):
                    self._note(outcome="accepted")
                    self._accept(candidate, spec)
                    if not candidate.variables:
                        self._limits = {}  # those of the pipeline before are not those of the tuned one
                        self._best.close()
                        self._best = contender
                        opened.pop_all()
                    return True
            except (Failed, DrivetrainError) as error:
                self._trials.pop()
                self._add(candidate, "failed", str(error))
        return False

    def _note(self, **changes: Any) -> None:
        self._trials[-1] = replace(self._trials[-1], **changes)

    def _opened(self, candidate: Candidate, spec: PipelineSpec, opened: ExitStack) -> tuple[Contender, Contender]:
        assert self._best is not None
        if not candidate.variables:
            contender = self._arena.open(candidate.name, spec)
            opened.callback(contender.close)
            return contender, self._best
        against = self._arena.open("without", spec, dict(self._variables))
        opened.callback(against.close)
        contender = self._arena.open(candidate.name, spec, {**self._variables, **candidate.variables})
        opened.callback(contender.close)
        return contender, against

    def _compare(self, contender: Contender, against: Contender, least: float) -> bool:
        """Run rounds until there is a verdict; return whether the contender is faster: by more than `least`."""
        ratios: list[float] = []
        speeds: list[float] = []
        while len(ratios) < LOOKS[-1]:
            self._number += 1
            own, other = self._arena.round(self._number, [contender, against])
            ratios.append(own / other)
            speeds.append(own)
            verdict, interval = judge(ratios, least)
            several = interval.n >= LOOKS[0]  # before, the interval tells nothing
            self._note(
                outcome="undecided", ratio=interval.value, low=interval.low if several else None,
                high=interval.high if several else None, rounds=interval.n, images_per_s=median(speeds),
                memory=contender.memory,
            )  # fmt: skip
            if verdict != "undecided":
                break
        reason = f"no verdict after {interval.n} rounds" if verdict == "undecided" else ""
        self._note(outcome="dropped", reason=reason)
        return verdict == "accepted"

    def _keeps_accuracy(self, spec: PipelineSpec) -> bool:
        """Train both from the same seeds. A change is a trade until it is shown to keep the accuracy."""
        self._note(outcome="trade", reason="the tuning ended before its accuracy was known")
        differences: list[float] = []
        while True:
            seed = self._given.seed + len(differences)
            self._show(f"{self._trials[-1].name}: accuracy, training {len(differences) + 1}")
            if seed not in self._accuracies:
                self._accuracies[seed] = self._arena.accuracy(self._given, seed)
            differences.append(self._arena.accuracy(spec, seed) - self._accuracies[seed])
            verdict, interval = judge_accuracy(differences)
            low, high = interval.low, interval.high
            self._note(accuracy=interval.value, accuracy_low=low, accuracy_high=high, seeds=interval.n)
            if verdict != "undecided" or interval.n == SEEDS[-1]:
                self._note(reason="")
                return verdict == "kept"

    def too_short(self, seconds: float) -> str:
        if any(one.outcome in ("accepted", "dropped", "trade") for one in self._trials):
            return ""
        needed = seconds * 4 if self._trial is None else 2 * LOOKS[1] * self._trial * len(self._changes)
        return f" No change has a verdict: pass about {rounded_up(max(needed, 4 * seconds)):g} s (--seconds)."

    def close(self) -> None:
        if self._best is not None:
            self._best.close()

    def result(self) -> Tuned:
        left = untried(self._changes, self._trials, self.untried)
        return Tuned(
            self._spec, [*self._trials, *left], self._limits, self._before, self._facts, self.stopped,
            self._variables,
        )  # fmt: skip
