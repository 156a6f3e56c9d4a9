"""Measure a ledger: what each stage contributes, in interleaved trials, and which part is the bottleneck.

In each round, every variant has one trial with the same loop on the same samples, which is checked. Ratios are taken
within a round, so that a drift of the machine's speed does not bias them. The first trials of plain PyTorch and the
full pipeline show what else fits into the time: the stages in turn, each stage alone, and the full pipeline without
each follow, each only if there is time for some rounds of all so far. After the deadline no batch starts, and half a
second later the running one is interrupted like by Ctrl-C: a ledger is late by at most one call into native code.
"""

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean
from time import perf_counter
from typing import Any

import torch

from ...common.budget import Budget, OutOfTime, alarm, rounded_up
from ...common.checks import is_number
from ...common.errors import DrivetrainError, LedgerError, PlanError
from ...common.terminal import progress_bar
from ..describe.config import LOADERS
from ..describe.cuda_settings import uses_gpu
from ..describe.pipeline_spec import PipelineSpec
from ..describe.plan import Plan
from ..describe.resolve import ResolvedPlan, choose_precision, resolve
from ..ledger.data import Accuracies, LedgerData, Trained
from ..ledger.ledger import Ledger, LedgerInterrupted
from ..ledger.variant import PLAIN, Costs, Trial, VariantId, same_samples
from ..runs.facts import measured_config
from ..runs.fit import fit
from ..tasks.scales import check_comparable
from ..telemetry.history import Epoch, Monitor
from ..telemetry.provenance import provenance
from ..training.build import fork_rng, plain_torch, resolve_data
from .runner import (
    MIN_BATCHES,
    Loaders,
    Variant,
    VariantRunner,
    check_measurable,
    describe_error,
    groups,
    peak_bytes,
)
from .variants import alone_and_without, in_turn, possible, variants, with_loader

MIN_ROUNDS, MAX_ROUNDS = 3, 30  # adding a stage in turn must leave time for MIN_ROUNDS
# Intervals of fewer rounds may be narrow by chance; adding any other variant must leave time for as many.
TIGHT_ROUNDS = 5
AIM_ROUNDS = 8  # the length of a trial is chosen for this many rounds
# Peak memory is measured in ledgers of at least PEAK_SECONDS, which reserve PEAK_RESERVE for its two processes.
PEAK_SECONDS, PEAK_RESERVE = 100, 20
NO_TIME = "not enough time; increase seconds"
NOT_REACHED = "the ledger was interrupted before its trial"
NOT_INTERLEAVED = (
    "No interleaved round is complete: these are the variants' first trials, one after the other. If the machine's "
    "speed changed in between, they are biased."
)
PLAIN_FAILED = "Plain PyTorch failed, so there is nothing to compare with"


@plain_torch()
def measure(
    spec: PipelineSpec, *, seconds: float, within: float, accuracy: bool, epochs: int | None,
    target: float | None, other_loader: str | None, progress: bool,
) -> Ledger:  # fmt: skip
    check_measurable(seconds)
    if not is_number(within, "(0, 1)"):
        raise PlanError(f"within={within!r} must be between 0 and 1: 0.02 means intervals of ± 2 %.")
    plan, epochs = checked(spec, accuracy=accuracy, epochs=epochs, target=target, other_loader=other_loader)
    plan = resolve_data(plan, progress)
    others = [] if other_loader is None else with_loader(plan, other_loader)
    for variant in others:
        _ = variant.plan  # raises if that loader cannot load the data
    ledger = _measured(plan, others, Budget(seconds, perf_counter(), progress, "ledger"), within)
    if accuracy and epochs is not None:
        return _train_each(ledger, plan, others, epochs, target, progress)
    return ledger


def checked(
    spec: PipelineSpec, *, accuracy: bool = False, epochs: int | None = None, target: float | None = None,
    other_loader: str | None = None,
) -> tuple[ResolvedPlan, int | None]:  # fmt: skip
    """Return the plan, and the epochs of the training runs; PlanError for options that it, or each other, excludes."""
    if accuracy and epochs is not None:
        spec = spec.replace(epochs=epochs)
    plan = resolve(spec)
    if accuracy:
        epochs = check_accuracy(plan, target)
    elif epochs is not None or target is not None:
        raise PlanError(
            "epochs and target configure the training runs of accuracy=True. Pass accuracy=True, or neither of them."
        )
    if other_loader is not None and (other_loader not in LOADERS or other_loader == plan.data.loader):
        known = ", ".join(repr(name) for name in LOADERS if name != plan.data.loader)
        raise PlanError(
            f"other_loader={other_loader!r} must be a loader other than the pipeline's, {plan.data.loader!r}: {known}."
        )
    return plan, epochs


def _measured(plan: ResolvedPlan, others: list[Variant], budget: Budget, within: float) -> Ledger:
    facts: dict[str, Any] = {
        "recipe": plan.recipe,
        "plan": Plan(plan.steps).to_dict()["steps"],
        "asked": {
            "loader": plan.data.loader,
            "precision": plan.distribution.precision,
            "compile": bool(plan.distribution.compile),
            "bf16": choose_precision(plan.distribution)[0] == "bf16",  # computed natively by the device
        },
        "batch_size": plan.data.batch_size,
    }
    always = variants(plan, copies=uses_gpu(plan.distribution))
    record = Record([variant.id for variant in (*always, *others, *alone_and_without(plan))])
    interrupted, error = False, ""
    try:
        # Trials draw random numbers, like training; the caller's generators do not change.
        with budget, fork_rng(plan.seed):
            _Measurement(plan, record, budget, within, others).run()
    except KeyboardInterrupt:
        interrupted = True
    except _NoLedger as failure:
        error = str(failure)
    ledger = record.ledger(facts, interrupted)
    if ledger is not None:
        used = {"seconds": round(budget.used, 1), "seconds_asked": budget.seconds}
        trial = {"batches_per_trial": ledger.rounds[0][PLAIN].images // plan.data.batch_size}
        ledger = dataclasses.replace(ledger, facts={**facts, **trial, **used, "provenance": provenance()})
    # Raised here, so that they do not keep the frames of the measurement alive, and with them every variant's model:
    # a notebook keeps the last exception.
    if interrupted:
        raise LedgerInterrupted(ledger)
    if error:
        raise LedgerError(error, ledger)
    assert ledger is not None  # otherwise there is an error
    return ledger


def _train_each(
    ledger: Ledger, plan: ResolvedPlan, others: list[Variant], epochs: int, target: float | None,
    progress: bool,
) -> Ledger:  # fmt: skip
    rows: dict[VariantId, Trained] = {}
    interrupted = False
    try:
        chosen = [*in_turn(plan), *others[:1], *possible(alone_and_without(plan))]
        train_each(chosen, rows, epochs, target, progress)
    except KeyboardInterrupt:
        interrupted = True
    if rows:
        reached = rows[PLAIN].accuracy if target is None else target
        ledger = dataclasses.replace(ledger, accuracy=Accuracies(epochs, reached, rows, plan.task.monitor))
    if interrupted:
        raise LedgerInterrupted(ledger)
    return ledger


@dataclass
class Record:
    """The results so far, without models, so that an exception can carry them."""

    variants: list[VariantId]  # in the order of a round: plain PyTorch first
    first: dict[VariantId, Trial] = field(default_factory=dict)  # trials, not interleaved
    rounds: list[dict[VariantId, Trial]] = field(default_factory=list)  # complete, of the same variants
    failed: dict[VariantId, str] = field(default_factory=dict)
    left_out: dict[VariantId, str] = field(default_factory=dict)
    costs: dict[VariantId, Costs] = field(default_factory=dict)
    missing_costs: dict[str, str] = field(default_factory=dict)
    stopped: str = ""

    @property
    def in_turn(self) -> list[VariantId]:
        return [one for one in self.variants if one.is_row]

    def fail(self, one: VariantId, reason: str) -> None:
        """Remove a variant from all rounds, including earlier ones, so that all have the same variants."""
        count = len(self.rounds)
        after = f" (after {count} round{'s' * (count > 1)})" if count and one in self.rounds[0] else ""
        self.failed[one] = f"{reason}{after}"
        self.costs.pop(one, None)
        for trials in (self.first, *self.rounds):
            trials.pop(one, None)

    def enough(self) -> bool:
        whole = self.in_turn[-1]
        return bool(self.rounds) or (PLAIN in self.first and (whole in self.first or whole in self.failed))

    def ledger(self, facts: Mapping[str, Any], interrupted: bool = False) -> Ledger | None:
        if not self.enough():
            return None
        rounds = self.rounds or [{one: self.first[one] for one in self.variants if one in self.first}]
        known = {*rounds[0], *self.failed, *self.left_out}
        missing = [one for one in self.variants if one not in known]
        return Ledger(
            rounds, facts, self.variants, stopped="Interrupted (Ctrl-C)" if interrupted else self.stopped,
            failed=dict(self.failed),
            left_out=self.left_out | dict.fromkeys(missing, NOT_REACHED if interrupted else NO_TIME),
            costs={one: self.costs[one] for one in self.variants if one in self.costs},
            missing_costs=dict(self.missing_costs), notes=() if self.rounds else (NOT_INTERLEAVED,),
        )  # fmt: skip


class _NoLedger(Exception):
    """Plain PyTorch failed, or the time is too short."""


class _Measurement:
    """One measurement of a ledger, from warm-up to the last round. `record` receives the results as they arrive."""

    def __init__(
        self, plan: ResolvedPlan, record: Record, budget: Budget, within: float,
        others: Sequence[Variant] = (),
    ) -> None:  # fmt: skip
        self._plan, self._record, self._budget, self._within = plan, record, budget, within
        self._others = list(others)
        self._always = variants(plan, copies=uses_gpu(plan.distribution))
        self._runners: list[VariantRunner] = []
        self._batches = 1  # of a first trial, and the minimum of any trial
        self._plain_seconds: float | None = None  # of plain PyTorch, including its first trial
        # On a GPU, the peak memory of each variant is measured during warm-up; else of two, in new processes.
        self._weighs = not uses_gpu(plan.distribution) and budget.seconds >= PEAK_SECONDS
        if not (self._weighs or uses_gpu(plan.distribution)):
            reason = f"it starts two processes, and requires seconds of at least {PEAK_SECONDS}"
            record.missing_costs["peak memory"] = reason
        self._deadline = budget.end - (PEAK_RESERVE if self._weighs else 0)

    def run(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._close)
            self._loaders = Loaders(stack)
            try:
                with alarm(self._deadline):
                    self._least()
                    self._add_further()
                    self._rounds()
            except OutOfTime:
                self._record.stopped = self._spent()
                if not self._record.enough():
                    raise _NoLedger(self._too_short()) from None
        if self._weighs:
            self._weigh()

    def _close(self) -> None:
        for runner in self._runners:
            runner.close()

    def _spent(self) -> str:
        return f"Stopped at the {self._budget.seconds:g} s budget"

    def _too_short(self) -> str:
        used, plain = self._budget.used, self._plain_seconds
        if plain is None:
            what, needed = "plain PyTorch was still in its first trial", 4 * used
        else:
            what = f"plain PyTorch had completed its first trial ({plain:.1f} s), but not the full pipeline"
            needed = plain + max(plain, 2 * (used - plain))
        return (
            f"seconds={self._budget.seconds:g} is too short: after {used:.1f} s {what}. A ledger needs one "
            f"trial of each: pass about {rounded_up(1.5 * needed):g} s, and several times as much to compare stages."
        )

    def _weigh(self) -> None:
        record, rows = self._record, in_turn(self._plan)
        for variant in (rows[0], rows[-1]):
            if variant.id not in record.costs:
                continue
            what = f"peak memory of {variant.id}"
            self._budget.show(what)
            if self._budget.left < PEAK_RESERVE / 4:
                record.missing_costs[what] = NO_TIME
                continue
            try:
                peak = peak_bytes(variant.plan, self._batches, self._budget.left)
            except DrivetrainError as error:
                record.missing_costs[what] = NO_TIME if self._budget.left <= 0 else describe_error(error)
            else:
                record.costs[variant.id] = dataclasses.replace(record.costs[variant.id], peak_bytes=peak)

    def _open(self, group: list[Variant], batches: int) -> VariantRunner | None:
        first = group[0].id
        self._budget.show(f"warming up {first}")
        if perf_counter() > self._deadline:
            raise OutOfTime
        try:
            runner = VariantRunner(group, self._loaders, batches, self._deadline)
        except OutOfTime:
            raise
        except Exception as error:
            reason = describe_error(error)
            if first == PLAIN:
                if isinstance(error, DrivetrainError):  # of model, data or device, as from `fit`
                    raise
                raise LedgerError(f"{PLAIN_FAILED}: {reason}") from error
        else:
            self._runners.append(runner)
            self._runners.sort(key=lambda one: self._record.variants.index(one.variants[0]))
            if not runner.on_ranks:  # ranks report costs after a trial
                self._record.costs[first] = runner.costs
            return runner
        for variant in group:
            self._record.fail(variant.id, reason)
        _free_memory()
        return None

    def _first(self, runner: VariantRunner) -> None:
        left, seconds = runner.variants, 0.0
        # Plain PyTorch's trial of one batch still counts.
        if self._batches == 1 and left[0] in self._record.first:
            left, seconds = left[1:], runner.seconds
        for chosen in [left] if runner.on_ranks else [left[:1], left[1:]]:
            if chosen and runner in self._runners:
                self._record.first |= self._run_trials(runner, chosen, 0, self._batches)
                seconds += runner.seconds
        runner.seconds = seconds
        same_samples(self._record.first)

    def _run_trials(
        self, runner: VariantRunner, chosen: list[VariantId], number: int, batches: int
    ) -> dict[VariantId, Trial]:
        self._budget.show(f"round {number}, {chosen[0]}" if number else f"first trial of {chosen[0]}")
        trials, failed = runner.run(number, batches, chosen, self._deadline)
        for one, reason in failed.items():
            if one == PLAIN:
                self._record.stopped = "Stopped because plain PyTorch failed"
                raise _NoLedger(f"{PLAIN_FAILED}: {reason}")
            self._record.fail(one, reason)
        runner.variants = [one for one in runner.variants if one not in failed]
        if not runner.variants:
            self._runners.remove(runner)
            runner.close()
        if failed:
            _free_memory()
        elif runner.on_ranks:
            self._record.costs[runner.variants[0]] = runner.costs
        return trials

    def _least(self) -> None:
        """Run one trial each of plain PyTorch and the full pipeline, and choose the number of batches of a trial."""
        plain, *others = groups(self._always)
        runner = self._open(plain, 1)
        assert runner is not None  # else it has raised
        self._record.first |= self._run_trials(runner, [PLAIN], 0, 1)
        self._batches = self._fewest(runner.seconds)
        self._first(runner)
        self._plain_seconds = self._budget.used
        if others and (runner := self._open(others[-1], self._batches)) is not None:
            self._first(runner)

    def _fewest(self, seconds: float) -> int:
        kinds = len(variants(self._plan)) - len(self._record.in_turn) + 2
        trials = 2 + kinds * (1 + MIN_ROUNDS)
        return min(max(int((self._deadline - perf_counter()) / 2 / (trials * seconds)), 1), MIN_BATCHES)

    def _add_further(self) -> None:
        between = [self._others] if self._others else []
        between += [[variant] for variant in in_turn(self._plan)[1:-1]]
        further = [[variant] for variant in alone_and_without(self._plan)]
        for group in (*between, *further):
            rounds = MIN_ROUNDS if group in between else TIGHT_ROUNDS
            try:
                on_ranks = group[0].plan.needs_ranks
            except DrivetrainError as error:
                self._record.left_out[group[0].id] = f"it cannot be measured: {error}"
                continue
            alike = [one for one in self._runners if one.on_ranks == on_ranks]
            opening = trial = 0.0
            if alike:
                opening = mean(one.opening for one in alike)
                trial = len(group) * mean(one.seconds / (1 if on_ranks else len(one.variants)) for one in alike)
            spent = sum(runner.seconds for runner in self._runners) + trial
            if perf_counter() + opening + trial + rounds * spent > self._deadline:
                self._record.left_out |= dict.fromkeys([one.id for one in group], NO_TIME)
            elif (runner := self._open(group, self._batches)) is not None:
                self._first(runner)

    def _rounds(self) -> None:
        record, trials = self._record, self._record.first
        starting = 0.0  # seconds per round for starting ranks
        for runner in self._runners:
            if runner.on_ranks:
                starting += runner.seconds - sum(trials[one].seconds for one in runner.variants)
        training = max(sum(runner.seconds for runner in self._runners) - starting, 1e-6)
        per_round = (self._deadline - perf_counter()) / AIM_ROUNDS - starting
        batches = max(int(self._batches * per_round / training), self._batches)
        longest = starting + training * batches / self._batches
        while not record.stopped:
            start, number = perf_counter(), len(record.rounds) + 1
            if number > TIGHT_ROUNDS and LedgerData(record.rounds, {}, record.variants).spread <= self._within:
                record.stopped = f"Stopped because every interval is within ± {self._within:.1%}"
            elif number > MAX_ROUNDS:
                record.stopped = "Stopped at the round limit"
            elif number > 1 and len(record.rounds[0]) == 1 < len(record.variants):
                record.stopped = "Stopped because all variants but plain PyTorch failed"
            elif start + longest > self._deadline:
                record.stopped = self._spent()
            else:
                record.rounds.append(self.round(self._runners, number, batches))
                longest = max(longest if number > 1 else 0.0, perf_counter() - start)

    def round(self, runners: list[VariantRunner], number: int, batches: int) -> dict[VariantId, Trial]:
        step = -1 if number % 2 == 0 else 1  # every second round backwards: none always follows the same one
        trials: dict[VariantId, Trial] = {}
        for runner in runners[::step]:
            trials |= self._run_trials(runner, runner.variants[::step], number, batches)
        trials = {one: trials[one] for runner in runners for one in runner.variants}
        same_samples(trials)
        return trials


def _free_memory() -> None:
    """Release a failed variant's memory: it may have failed for lack of memory."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def check_accuracy(plan: ResolvedPlan, target: float | None) -> int:
    epochs = plan.spec.epochs
    if epochs is None:
        raise PlanError("Number of epochs not set. Pass ledger(accuracy=True, epochs=…) (--epochs).")
    if plan.data.val is None:
        raise PlanError("accuracy=True needs validation data. Pass a second file to load() (--val).")
    check_comparable(plan.task, "accuracy=True")
    if target is not None and not is_number(target, "(0, 1]"):
        raise PlanError(f"target={target!r} is an accuracy and must be a number in (0, 1].")
    return epochs


def train_each(
    variants: Sequence[Variant], rows: dict[VariantId, Trained], epochs: int, target: float | None,
    progress: bool,
) -> None:  # fmt: skip
    with progress_bar(len(variants), progress, unit="training") as bar:
        for number, variant in enumerate(variants, 1):
            bar.set_description(f"ledger: accuracy, training {number}/{len(variants)}: {variant.id}")
            rows[variant.id] = row = _trained(variant, epochs, target, sets_target=number == 1)
            if number == 1 and target is None:
                target = row.accuracy
            bar.update()


def _trained(variant: Variant, epochs: int, target: float | None, sets_target: bool) -> Trained:
    try:
        run = fit(variant.spec, measured_config(variant.spec, epochs=epochs)).history
    except Exception as error:  # e.g. out of memory: continue with the others
        return Trained(failed=describe_error(error))
    seconds = sum(epoch.seconds for epoch in run.epochs)
    if run.monitored is None:
        return Trained(seconds=seconds, failed=f"{run.monitor} has no value in its last evaluation")
    accuracy = run.monitor.fraction(run.monitored)
    if target is None and sets_target:
        target = accuracy
    reached = None if target is None else seconds_to(target, run.epochs, run.monitor)
    return Trained(accuracy, seconds, reached)


def seconds_to(target: float, history: Sequence[Epoch], monitor: Monitor) -> float | None:
    spent = 0.0
    for epoch in history:
        spent += epoch.seconds
        value = monitor.of(epoch)
        if value is not None and monitor.reaches(monitor.fraction(value), target):
            return spent
    return None
