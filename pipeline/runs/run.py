"""A run on one rank: from scratch or a checkpoint to the last epoch."""

import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import torch

from ...common.errors import CheckpointError, NonFiniteError, StrategyError
from ...common.model_state import ModelState, buffers_kept, describe_frozen, split_state, train_mode
from ...common.rows import local_part
from ...strategies.common.optimizer_state import as_held
from ...strategies.devices import wait_for
from ...strategies.launching.group import of_all_ranks
from ..callbacks.callback import RunView
from ..describe.inputs import Inputs
from ..describe.resolve import ResolvedPlan
from ..tasks.scales import scales
from ..telemetry.history import Epoch, Evaluation, History
from ..telemetry.loggers import Metrics
from ..telemetry.observer import Observer, Observers
from ..telemetry.progress import Progress, progress_file
from ..telemetry.provenance import provenance
from ..telemetry.rank_times import RankClock
from ..telemetry.state import TrainState
from ..training.agreement import Requests
from ..training.build import Built, refuse_vacant
from ..training.guard import NonFiniteGuard
from ..training.loop import EpochStats, evaluate, train_epoch
from ..training.schedule import Schedule
from .artifacts import FitJob, RankResult, RunArtifacts
from .callbacks import RunCallbacks
from .checkpoints import state as states
from .checkpoints.directory import CheckpointDir, CheckpointWarning, ResumePoint, begin_run, choose_start
from .checkpoints.fingerprint import (
    VALIDATION,
    check_compatible,
    check_model,
    compare_validation,
    description,
    fingerprint,
    tied_to_length,
)
from .checkpoints.format import Checkpoint
from .checkpoints.remote import RemoteRun, shown
from .checkpoints.shards import gathered_one_by_one
from .checkpoints.state import evaluated_state
from .checkpoints.writer import CheckpointWriter
from .folder import PublishResults, hyperparameters
from .initial import Matched
from .result import TrainingInterrupted, TrainingPreempted

_NAMED = 20  # replaced samples that a line names


class Run(Observer):
    """One run on this rank, and the last observer of its loop: it saves checkpoints, and leaves on request."""

    def __init__(
        self, plan: ResolvedPlan, built: Built, job: FitJob, outcome: RankResult, initial: Matched | None = None,
        requests: Requests | None = None,
    ) -> None:  # fmt: skip
        self._plan, self._built, self._job, self._outcome = plan, built, job, outcome
        self._requests = requests = requests or Requests()
        self._initial = initial
        self._engine, self._hooks = built.engine, built.hooks
        self._lead = built.engine.rank == 0
        self._length = built.train.full_length  # steps in an epoch with all samples
        self._facts = fingerprint(plan, built, job.epochs)
        scale = plan.optimization.scheduled_scale(plan.data.batch_size)
        self._schedule = Schedule(plan.optimization, self._engine.optimizer, job.epochs * self._length, scale)
        self._store = None if job.folder is None else CheckpointDir(job.folder.resolve() / "checkpoints")
        scaled = plan.distribution.precision == "fp16"
        clock = None
        if built.engine.world_size > 1:
            apart = not (built.engine.sharded or plan.distribution.sync_batchnorm)
            clock = RankClock(
                built.engine, job.log_every, apart=apart, received=lambda *of: self._metrics.log_ranks(*of),
                named=lambda straggler: self._artifacts.add_straggler(straggler),
            )  # fmt: skip
        self._clock: Observer = clock or Observer()
        self._guard = NonFiniteGuard(self._engine, job.on_nonfinite, self._advice, requests, scaled=scaled, clock=clock)
        self._units = {name: each.unit for name, each in scales(plan.task).items() if each.unit is not None}
        self._inputs = Inputs.of(built.train, built.val, plan.data.eval_size).to_dict()
        facts: dict[str, Any] = {
            "recipe": plan.recipe, "seed": plan.seed, "planned": job.epochs, "provenance": provenance(),
            "monitor": asdict(built.monitor), "units": self._units, "inputs": self._inputs, "task": repr(plan.task),
        }  # fmt: skip
        self._notes = {
            "strategy": built.engine.note, "parameter groups": built.note, "BatchNorm": built.split_batch_norm,
            "targets": built.targets,
        }  # fmt: skip
        facts |= {name: note for name, note in self._notes.items() if note}
        if initial is not None:
            facts["init_from"] = initial.to_dict()
        self._artifacts = RunArtifacts(job, outcome, self._lead, facts, job.epochs * self._length)
        self._echo = self._artifacts.echo
        loggers = job.logger if self._lead else ()
        self._metrics = Metrics(
            loggers, job.folder, job.log_every, hyperparameters(plan, job.epochs) if loggers else {}
        )
        view = RunView(self._engine, lambda: self.state, job.epochs, job.folder, self._metrics.log, self._echo)
        every = None if built.val is None else job.eval_every_steps
        self._callbacks = RunCallbacks(
            job.callbacks,
            self._engine,
            view,
            every,
            self._evaluate_within,
            self._stop,
            clock,
            plan.distribution.timeout,
        )
        buffers = self._engine.plain_model.named_buffers()
        self._infinite = {name for name, value in buffers if not value.isfinite().all()} - built.without_values.keys()
        self._name = ""
        self._writer: CheckpointWriter | None = None
        self._publishing: PublishResults | None = None
        self._observer: Observer = self._guard
        self._bar: Observer = Observer()

    @property
    def state(self) -> TrainState:
        return self._hooks.state

    def train(self) -> None:
        initial = "" if self._initial is None else str(self._initial)
        frozen = describe_frozen(self._engine.plain_model)
        for note in filter(None, [*self._notes.values(), initial, frozen and f"Frozen: {frozen}."]):
            self._echo(note)
        self._compare_data()
        choice = choose_start(self._engine, self._job.resume, self._store)
        self._name = choice.run
        if self._store is not None and self._job.checkpoints is not None:
            self._writer = CheckpointWriter(self._engine, self._store, self._job.checkpoints, choice.run)
        remote = RemoteRun.at(self._job.folder) if self._lead else None
        self._publishing = None if remote is None else PublishResults(remote)
        self._observer = Observers(
            self._clock, self._guard, self._metrics, self._artifacts, self._callbacks,
            self._publishing or Observer(), self,
        )  # fmt: skip
        failed = True
        try:
            self._begin(choice)
            self._observer.on_start(self.state)
            while self.state.epoch < self._job.epochs and self.state.stop is None:
                self._epoch()
            self._hooks.finish()
            self._outcome.callbacks = self._callbacks.finish()
            failed = False
        finally:
            try:
                if failed:
                    self._callbacks.fail()  # before the loggers are closed, to which they may log
            finally:
                self._observer.on_end(failed=failed)

    def _compare_data(self) -> None:
        """Raise on all ranks if one has other data: one machine may have looked at files at addresses minutes before,
        another one since they were replaced; or it lacks manifests, or has other files of `indices` or `balance`, which
        `preflight` does not compare. It could not resume from the checkpoints, which have the facts of rank 0."""
        names = ("training samples", "training data (CRC-32)", "selected samples (CRC-32)", VALIDATION)
        *own, val = (self._facts.get(name) for name in names)
        if len(set(of_all_ranks(json.dumps([own, val and val[1]]), self._engine.world_size))) > 1:
            raise StrategyError(
                "The ranks have other data: one has files without their manifests (.beton.json), or another file of "
                "indices= or balance=; or files at addresses were replaced within the last ten minutes, after one "
                "machine had looked at them. Copy each manifest with its file, and the file of indices= or balance=, "
                "to all machines; or run the same command again later."
            )

    def _begin(self, choice: ResumePoint) -> None:
        checkpoint = choice.checkpoint
        if checkpoint is None:
            refuse_vacant(self._built.without_values)
            self._hooks.begin(self._engine, self._job.epochs * self._length, self._built.train)
            self._take_folder(choice)
            if note := self._hooks.note():
                self._echo(note)
            if self._job.resume is not None:
                start = "from scratch" if self._initial is None else "with these weights"
                self._echo(f"There is no checkpoint yet: training starts {start}.")
            return
        content = checkpoint.content
        check_compatible(content.facts, self._facts, checkpoint.path, tied_to_length(self._plan))
        if note := check_model(content.facts, self._facts, checkpoint.place, changed=self._job.changed_model):
            self._echo(note)
        if self._lead:
            for note in filter(None, [compare_validation(content.facts, self._facts), self._compare_sizes(checkpoint)]):
                warnings.warn(note, CheckpointWarning, stacklevel=2)
        if content.epoch + (content.step_in_epoch > 0) > self._job.epochs:
            raise CheckpointError(
                f"The checkpoint {checkpoint.place} was saved after {content.epoch} epochs and "
                f"{content.step_in_epoch} steps, more than epochs={self._job.epochs}. Pass more epochs."
            )
        checkpoint.check_length(self._length, pruned=any(t.prunes_samples for t in self._plan.transforms))
        states.load_engine(checkpoint, self._engine)
        if left := states.buffers_left(checkpoint, self._engine):
            vacant = self._built.without_values
            refuse_vacant({name: vacant[name] for name in left if name in vacant})
            self._echo(
                f"{checkpoint.place} was written by Drivetrain {content.drivetrain}, which did not save the "
                f"non-persistent buffers: {', '.join(left[:8])} begin as the model's constructor sets them."
            )
        self._hooks.begin(self._engine, self._job.epochs * self._length, self._built.train)
        states.load_hooks(checkpoint, self._built)
        with states.restoring(checkpoint):
            self._built.begin_epoch()
            # A run that was left after the last step of an epoch has still to evaluate it.
            self._built.train.load_state_dict(content.loader, within=content.step_in_epoch > 0)
        history = self._history(checkpoint)
        self._take_folder(choice)
        self._restore_results(checkpoint, history)
        self._restore_callbacks(checkpoint)
        states.load_randomness(checkpoint, self._engine, self._plan.seed)

    def _compare_sizes(self, checkpoint: Checkpoint) -> str:
        """Return a warning if the images in evaluation have another size, or ""."""
        saved, now = checkpoint.content.history.facts.get("inputs"), self._inputs["image_size"]
        before = saved.get("image_size") if isinstance(saved, dict) else None  # of older runs there is none
        if before in (None, now) or self._built.val is None:
            return ""
        return (
            f"The images in evaluation had {before} pixels (eval_image_size), and have now {now}: the best checkpoint "
            "and early stopping compare metrics of both."
        )

    def _take_folder(self, choice: ResumePoint) -> None:
        """Claim the folder for this run. Errors before this leave its contents unchanged."""
        clear = self._artifacts.clear_gauges if choice.goes_on else self._artifacts.clear
        begin_run(self._engine, choice, self._store, clear, saves=self._job.checkpoints is not None)

    def _history(self, checkpoint: Checkpoint) -> History:
        content, facts = checkpoint.content, dict(checkpoint.content.history.facts)
        here = {"step": content.step, "strategy": content.strategy, "ranks": len(content.ranks)}
        if self._job.continue_stopped and "stopped" in facts:
            here["stopped"] = facts.pop("stopped")
        if "stopped" in facts:  # by version 0.2.0, without `within`
            facts["stopped"] = {**facts["stopped"], "within": content.step_in_epoch}
        elif content.epoch < self._job.epochs:  # it will be evaluated here, perhaps on images of another size
            facts["inputs"] = self._inputs
        since = [*facts.get("resumed", []), {**here, "provenance": provenance()}]
        return replace(content.history, facts={**facts, "planned": self._job.epochs, "resumed": since})

    def _restore_results(self, checkpoint: Checkpoint, history: History) -> None:
        content, place, within = checkpoint.content, checkpoint.place, checkpoint.content.step_in_epoch
        self.state.stop = history.stopped
        if history.stopped is not None:
            self._echo(
                f"{place} is of a run that was stopped: {history.stopped}. This is its result; "
                "fit(continue_stopped=True) would continue it."
            )
        elif content.epoch < self._job.epochs:
            self._echo(f"Resumed from {place}: step {within} of epoch {content.epoch + 1}.")
        else:
            self._echo(f"Resumed from {place}: the training was finished.")
        if within and history.stopped is None:
            self._artifacts.resume(history)
            return
        keeps = self._keeps(self._job.epochs if history.stopped is not None else content.epoch)
        self._artifacts.keep(history, lambda: evaluated_state(checkpoint) if keeps else ModelState())

    def _restore_callbacks(self, checkpoint: Checkpoint) -> None:
        ranks = checkpoint.content.ranks
        own = self._engine.rank if len(ranks) == self._engine.world_size else 0
        unknown = self._callbacks.restore(ranks[own].callbacks, self._artifacts.history.epochs)
        if unknown and self.state.stop is None:
            self._echo(
                f"{checkpoint.place} has the state of {', '.join(unknown)}, which is not among callbacks=[…]; it is "
                "ignored."
            )

    def _epoch(self) -> None:
        built, hooks, state, artifacts, job = self._built, self._hooks, self.state, self._artifacts, self._job
        start, number = perf_counter(), state.epoch + 1
        earlier, replaced = state.meter.seconds + state.meter.evaluation_s, state.meter.replaced
        if not state.meter.steps:
            built.begin_epoch()
        total, show = state.epoch_steps * built.train.settings.batch_size, job.progress and self._lead
        file = progress_file(job.in_cell)
        with Progress(number, job.epochs, total, artifacts.history.latest, show=show, file=file) as bar:
            observer = Observers(bar, self._observer)
            self._bar = bar
            stats = train_epoch(self._engine, built.train, built.loss, hooks, self._schedule, observer)
            if state.epoch < number:  # stopped within the epoch
                return
            replaced += self._replaced()
            with self._evaluating():
                evaluation = self._evaluate(number) if self._evaluates(number) else None
                self._check(number, stats, evaluation)
                epoch = Epoch(
                    number, stats.loss, None if evaluation is None else evaluation.val_loss,
                    {} if evaluation is None else evaluation.metrics,
                    images_per_s=stats.images / stats.seconds,
                    data_wait_fraction=stats.data_wait_s / stats.seconds,
                    seconds=earlier + perf_counter() - start, lr=state.lr,
                    skipped=stats.skipped + stats.overflowed, replaced=replaced, units=self._units,
                )  # fmt: skip
                if evaluation is not None:
                    self._callbacks.on_evaluation_end(state, evaluation)
                artifacts.add(epoch, lambda: self._weights(number))
            observer.on_epoch_end(state, epoch)

    def _replaced(self) -> int:
        loader = self._built.train
        if loader.settings.on_error != "skip":
            return 0
        own, loader.replaced = loader.replaced, []
        samples = sorted(sample for each in of_all_ranks(own, self._engine.world_size) for sample in each)
        if samples:
            self._echo(
                f"{len(samples)} of the epoch's samples cannot be decoded, and others took their places: "
                f"{', '.join(map(str, samples[:_NAMED]))}{', …' if len(samples) > _NAMED else ''}. Run drivetrain "
                "verify for all."
            )
        return len(samples)

    def _evaluates(self, number: int) -> bool:
        job = self._job
        due = job.eval_every_steps is not None and self.state.step % job.eval_every_steps == 0
        due = due or number == job.epochs or number % job.eval_every == 0
        return self._built.val is not None and due

    def _evaluate(self, number: int) -> Evaluation:
        assert self._built.val is not None
        metrics = evaluate(self._engine, self._built.val, self._hooks, self._built.plan.task)
        return Evaluation(number, self.state.step, metrics.pop("val_loss"), metrics, self._units)

    def _evaluate_within(self) -> None:
        """Evaluate between two steps, without an influence on the following ones."""
        start, state, engine = perf_counter(), self.state, self._engine
        wait_for(engine.device)  # the steps that it has not finished yet are training
        waited = perf_counter()
        state.meter.seconds += waited - start
        with buffers_kept(engine.plain_model), self._evaluating():
            evaluation = self._evaluate(state.epoch + (state.meter.steps > 0))
            if not math.isfinite(evaluation.val_loss):
                what = f"After step {state.step} the loss in validation is {evaluation.val_loss}."
                raise NonFiniteError(f"{what} {self._advice()}")
            self._artifacts.add_evaluation(evaluation)
            Observers(self._bar, self._observer).on_evaluation_end(state, evaluation)
        engine.reshard()
        train_mode(engine.model)
        state.meter.evaluation_s += perf_counter() - waited

    def _stop(self, reason: str) -> None:
        state, within, artifacts = self.state, self.state.meter.steps, self._artifacts
        artifacts.flush()  # the steps until now belong to the history that is kept here
        epochs, evaluations = artifacts.history.epochs, artifacts.history.evaluations
        rated = bool(epochs) and epochs[-1].val_loss is not None and not within
        rated = rated or (bool(evaluations) and evaluations[-1].step == state.step)
        if self._built.val is not None and not rated:
            self._evaluate_within()
        stopped = {"reason": reason, "epoch": state.epoch, "step": state.step, "within": within}
        history = replace(artifacts.history, facts={**artifacts.history.facts, "stopped": stopped})
        with buffers_kept(self._engine.plain_model), self._evaluating():
            artifacts.keep(history, lambda: self._weights(self._job.epochs))
        self._echo(f"Stopped after step {state.step:,} (epoch {state.epoch + (within > 0)}): {reason}.")

    def on_step_end(self, state: TrainState) -> None:
        """Save within the epoch when due, or if the run is stopped there; `on_epoch_end` saves at its end, after the
        evaluation, for which a request to stop does not wait. Then leave, if the ranks have agreed to."""
        requests, options = self._requests, self._job.checkpoints
        if self._writer is not None and options is not None:
            due = options.every_steps is not None and state.step % options.every_steps == 0
            within = state.meter.steps < state.epoch_steps
            if requests.stop or (within and (due or state.stop is not None or requests.save)):
                self._guard.check_weights(state)
                self._save()
        if requests.stop and state.stop is None:
            self._leave()

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:  # noqa: ARG002
        """Save, and leave on request: on CUDA, the ranks agree on the last step of an epoch after `on_step_end`."""
        if self._writer is not None:
            self._save()
        if self._requests.stop and state.stop is None and state.epoch < self._job.epochs:
            self._leave()

    def on_end(self, *, failed: bool) -> None:
        """Wait for pending writes; after a failure, only briefly and without the other ranks."""
        if self._writer is None:
            return
        with ExitStack() as stack:
            stack.callback(self._writer.give_up, interrupted=isinstance(sys.exception(), KeyboardInterrupt))
            if not failed:
                self._writer.close()
                stack.pop_all()

    def _save(self) -> None:
        assert self._writer is not None
        self._artifacts.flush()
        self._writer.settle()  # before the next copy of all values: the thread holds one while it writes
        if self._publishing is not None:
            self._publishing.begin()  # the log until here: who resumes on another machine has no other
        part, content = states.capture_state(
            self._built, run=self._name, strategy=self._plan.distribution.name, facts=self._facts,
            description=description(self._plan), history=self._artifacts.history,
            callbacks=self._callbacks.states(),
        )  # fmt: skip
        bad = torch.tensor(float(not states.all_finite(part, self._engine.plain_model)))
        if self._engine.reduce(bad, "sum").item():
            raise NonFiniteError(
                f"After step {self.state.step} the weights are not finite; they were not saved. {self._advice()}"
            )
        self._writer.save(part, content)
        self._requests.saved()

    def _leave(self) -> None:
        state, saved = self.state, None
        if self._writer is not None and self._store is not None:
            self._writer.close()
            saved = self._store.place(state.step)
        if self._requests.interrupted:
            raise TrainingInterrupted(checkpoint=saved)
        by = f" by {self._requests.signal}" if self._requests.signal else ""
        where = "nothing was saved, because there are no checkpoints (--out)"
        if saved is not None:
            where = f"saved {saved}. Run {self._job.command_to_continue} to continue"
        message = f"Stopped{by} after step {state.step:,}; {where}."
        self._echo(message)
        raise TrainingPreempted(self._requests.signal, saved, message)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._guard.check_weights(self.state)
        self._engine.sync_buffers()
        with self._hooks.evaluating():
            self._engine.sync_buffers()  # averages of buffers (EMA, SWA) differ between ranks, too
            yield

    def _weights(self, epoch: int) -> ModelState:
        """Gather all evaluated tensors for the ranks that keep them. Raise on every rank if a value is not finite that
        was finite before the run. Of a sharded model, rank 0 gathers one at a time into its file."""
        engine, model, keeps = self._engine, self._engine.plain_model, self._keeps(epoch)
        streams = engine.shards > 0 and self._job.folder is not None and not self._job.on_each_rank(epoch)
        state = split_state(model, engine.export_state(as_held if streams else lambda _: keeps))
        bad = [name for name, value in state.weights.items() if not local_part(value).isfinite().all()]
        # A forward may set what the state dict leaves out, such as a mask with infinities.
        bad += [name for name, value in state.unlisted.items() if local_part(value).isnan().any()]
        bad = [name for name in bad if name not in self._infinite]
        if engine.reduce(torch.tensor(float(len(bad))), "sum").item():
            where = f" ({', '.join(bad[:8])})" if bad else ""
            raise NonFiniteError(
                f"After step {self.state.step} the weights used in evaluation are not finite{where}; they were not "
                f"saved. {self._advice()}"
            )
        return gathered_one_by_one(engine, state) if streams else state

    def _keeps(self, epoch: int) -> bool:
        """The ranks gather the full weights for rank 0; at the end for all, if each returns the result to a caller."""
        return self._lead or self._job.on_each_rank(epoch)

    def _check(self, number: int, stats: EpochStats, evaluation: Evaluation | None) -> None:
        val_loss = None if evaluation is None else evaluation.val_loss
        if stats.skipped >= self.state.epoch_steps:
            raise NonFiniteError(f"In epoch {number} no step had a finite loss. {self._advice()}")
        if not math.isfinite(stats.loss) or not math.isfinite(val_loss or 0.0):
            raise NonFiniteError(
                f"In epoch {number} the loss is {stats.loss}, in validation {val_loss}. {self._advice()}"
            )

    def _advice(self) -> str:
        if self._writer is not None:
            self._writer.wait_a_moment()
        last = None if self._store is None else self._store.last(self._name)
        good = f"The last good checkpoint is {shown(last)}." if last else "There is no earlier checkpoint."
        rate = self._plan.optimization.describe()
        return f"{good} Lower the learning rate ({rate}), add warm-up, or set clip_norm."
