"""A run on one rank: from a checkpoint or the start to the last epoch, with checkpoints on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch

from ...errors import CheckpointError, NonFiniteError
from ...version import __version__
from ..checkpoints import resume as resuming
from ..checkpoints.capture import all_finite, take
from ..checkpoints.directory import Store
from ..checkpoints.export import evaluated_state
from ..checkpoints.fields import check_length
from ..checkpoints.fingerprint import (
    check_hyperparameters,
    check_same,
    description,
    run_facts,
    tied_to_length,
)
from ..checkpoints.format import Checkpoint
from ..checkpoints.writer import Saver
from ..spec.optimizers import Schedule
from ..spec.resolve import ResolvedPlan
from ..telemetry.history import Epoch, History
from ..telemetry.meter import Sums
from ..telemetry.progress import Progress, place_of_bar
from ..telemetry.provenance import provenance
from ..training.build import Built
from ..training.guard import LossGuard
from ..training.loop import EpochStats, evaluate, train_epoch
from .artifacts import Job, Outcome, Records


class Run:
    """One training on this rank.

    Args:
        plan: what is trained.
        built: its parts.
        job: how.
        outcome: is kept up to date with the epochs that are finished.
    """

    def __init__(self, plan: ResolvedPlan, built: Built, job: Job, outcome: Outcome) -> None:
        self._plan, self._built, self._job = plan, built, job
        self._engine, self._methods = built.engine, built.methods
        self._lead = built.engine.rank == 0
        self._image_size = built.train.settings.image_size
        self._length = len(built.train)  # steps in an epoch
        self._facts = run_facts(plan, built, job.epochs)
        self._schedule = Schedule(plan.optimization, self._engine.optimizer, job.epochs * self._length)
        self._sums = self._no_sums()
        self._store = None if job.folder is None else Store(job.folder.resolve() / "checkpoints")
        self._guard = LossGuard(self._engine, job.on_nonfinite, self._step_now, self._advice)
        facts: dict[str, Any] = {"recipe": plan.recipe, "seed": plan.seed, "provenance": provenance()}
        if built.engine.note:
            facts["strategy"] = built.engine.note
        self._records = Records(job, outcome, self._lead, facts)
        self._name = ""
        self._saver: Saver | None = None

    def train(self) -> None:
        """Trains what is left of the run."""
        if self._engine.note:
            self._records.say(self._engine.note)
        options = self._job.checkpoints
        choice = resuming.choose(self._engine, self._job.resume, self._store)
        self._name = choice.run
        if self._store is not None and options is not None:
            self._saver = Saver(self._engine, self._store, options, choice.run)
        try:
            epoch = self._begin(choice)
            self._records.begin(self._methods.clock.step)
            for number in range(epoch + 1, self._job.epochs + 1):
                self._epoch(number)
            self._methods.finish()
            if self._saver is not None:
                self._saver.close()
        except BaseException:
            if self._saver is not None:
                self._saver.give_up()
            raise
        finally:
            self._records.close()

    def _begin(self, choice: resuming.Choice) -> int:
        """Starts from scratch, or restores everything; returns the epochs that are finished."""
        checkpoint = choice.checkpoint
        if checkpoint is None:
            self._methods.begin(self._engine, self._job.epochs * self._length)
            self._take_folder(choice)
            if self._store is not None and self._lead and self._job.checkpoints is None:
                self._store.clear()  # else those of an earlier run go when the first of this one is complete
            if note := self._methods.note():
                self._records.say(note)
            if self._job.resume is not None:
                self._records.say("There is no checkpoint yet: the training starts from the beginning.")
            return 0
        state, step = checkpoint.state, checkpoint.state["step"]
        check_same(state["facts"], self._facts, checkpoint.path, tied_to_length(self._plan))
        if state["epoch"] + (state["step_in_epoch"] > 0) > self._job.epochs:
            raise CheckpointError(
                f"The checkpoint {checkpoint.path} is after {state['epoch']} epochs and {state['step_in_epoch']} "
                f"steps; epochs={self._job.epochs} must not be fewer."
            )
        check_length(checkpoint.path, state, self._length)
        check_hyperparameters(state["optimizer"]["groups"], self._facts, checkpoint.path)
        resuming.load_engine(checkpoint, self._engine)
        self._methods.begin(self._engine, self._job.epochs * self._length)
        resuming.load_methods(checkpoint, self._built)
        self._sums = resuming.load_sums(checkpoint, self._engine)
        # What an epoch's beginning decides is decided as it was, also in the middle of the epoch.
        self._methods.clock.step = step - state["step_in_epoch"]
        with resuming.restoring(checkpoint):
            self._methods.begin_epoch(self._engine, self._built.train, self._image_size)
            self._built.train.load_state_dict(state["loader"])
            self._methods.clock.step, self._schedule.step = step, state["schedule"]["step"]
        history = self._history(checkpoint)
        self._take_folder(choice)
        self._go_on(checkpoint, history)
        resuming.load_randomness(checkpoint, self._engine, self._plan.seed)
        return int(state["epoch"])

    def _take_folder(self, choice: resuming.Choice) -> None:
        """Makes the folder that of this run; until here, an error leaves what is in it as it was."""
        resuming.begin(self._engine, choice, self._store, saves=self._job.checkpoints is not None)
        if not choice.goes_on:
            self._records.clear()

    @staticmethod
    def _history(checkpoint: Checkpoint) -> History:
        """That of the checkpoint, with a note on where it was resumed."""
        state, before = checkpoint.state, resuming.load_history(checkpoint)
        here = {"step": state["step"], "strategy": state["strategy"], "ranks": len(state["ranks"])}
        since = [*before.facts.get("resumed", []), {**here, "provenance": provenance()}]
        return History(before.epochs, {**before.facts, "resumed": since})

    def _go_on(self, checkpoint: Checkpoint, history: History) -> None:
        """Keeps the history; a run that has finished epochs has its result already."""
        state = checkpoint.state
        self._records.say(
            f"Resumed from {checkpoint.path}: step {state['step_in_epoch']} of epoch {state['epoch'] + 1}."
            if state["epoch"] < self._job.epochs
            else f"Resumed from {checkpoint.path}: the training was finished."
        )
        if not state["step_in_epoch"]:
            keeps = self._keeps(state["epoch"])
            self._records.keep(history, lambda: evaluated_state(checkpoint) if keeps else {})
        else:
            self._records.resume(history)

    def _epoch(self, number: int) -> None:
        built, methods, records, start = self._built, self._methods, self._records, perf_counter()
        earlier = self._sums.elapsed
        if not self._sums.steps:
            methods.begin_epoch(self._engine, built.train, self._image_size)
        images, total = built.train.settings.batch_size, self._length * built.train.settings.batch_size
        show, file = self._job.progress and self._lead, place_of_bar(self._job.in_cell)
        with Progress(number, self._job.epochs, total, records.history.accuracy, show=show, file=file) as bar:
            bar.skip(self._sums.steps * images)
            records.metrics.begin_epoch(self._sums)

            def after_step(images: int, loss: torch.Tensor) -> None:
                bar.update(images, loss, self._sums)
                self._sums.elapsed = earlier + perf_counter() - start
                records.metrics.after_step(self._methods.clock.step, loss, self._schedule.lr, self._sums)
                self._save_if_due(number)

            stats = train_epoch(
                self._engine, built.train, built.loss, self._schedule.advance, after_step, methods, self._sums,
                self._guard,
            )  # fmt: skip
            with self._evaluating():
                val_loss, accuracy = evaluate(self._engine, built.val, methods) if built.val else (None, None)
                self._check(number, stats, val_loss)
                epoch = Epoch(
                    epoch=number,
                    loss=stats.loss,
                    val_loss=val_loss,
                    accuracy=accuracy,
                    images_per_s=stats.images / stats.seconds,
                    waiting=stats.waited / stats.seconds,
                    seconds=earlier + perf_counter() - start,
                    lr=self._schedule.lr,
                    skipped=stats.skipped + stats.overflowed,
                )
                keeps = self._keeps(number)
                records.add(epoch, lambda: self._engine.export_state(lambda _: keeps))
            bar.line(f"{epoch}{self._time_left(epoch)}")
            records.metrics.after_epoch(self._methods.clock.step, epoch)
            records.draw_if_due()
        self._sums = self._no_sums()
        self._save(number, 0)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside it the model has the weights that are evaluated and kept, the same on every rank."""
        self._engine.sync_buffers()
        with self._methods.evaluating():
            self._engine.sync_buffers()  # averages of buffers (EMA, SWA) are each rank's own, too
            yield

    def _keeps(self, epoch: int) -> bool:
        """Whether this rank keeps the whole weights after an epoch, which all ranks gather together: rank 0; where
        each rank gives its caller the result, after the last epoch all of them."""
        return self._lead or (self._job.each_rank and epoch >= self._job.epochs)

    def _time_left(self, epoch: Epoch) -> str:
        """Of the whole training, if the epochs to come take as long as this one."""
        seconds = round((self._job.epochs - epoch.epoch) * epoch.seconds)
        return f"  {timedelta(seconds=seconds)} left" if seconds else ""

    def _check(self, number: int, stats: EpochStats, val_loss: float | None) -> None:
        if stats.skipped >= self._length:
            raise NonFiniteError(f"In epoch {number} no step had a finite loss. {self._advice()}")
        if not math.isfinite(stats.loss) or not math.isfinite(val_loss or 0.0):
            raise NonFiniteError(
                f"In epoch {number} the loss is {stats.loss}, in validation {val_loss}. {self._advice()}"
            )

    def _save_if_due(self, number: int) -> None:
        """In the middle of an epoch, if steps are counted; its end has a checkpoint anyway."""
        options, steps = self._job.checkpoints, self._sums.steps
        if self._saver is None or options is None or options.every_steps is None or steps >= self._length:
            return
        if self._methods.clock.step % options.every_steps == 0:
            self._guard.flush()
            self._save(number - 1, steps)

    def _save(self, epoch: int, step_in_epoch: int) -> None:
        """A checkpoint after `epoch` whole epochs and so many steps of the next."""
        if self._saver is None:
            return
        part, whole = take(self._engine, self._methods, self._sums)
        bad = torch.tensor(float(not all_finite(part, whole["parameters"])))
        if self._engine.reduce(bad, "sum").item():  # each rank has looked at what it writes
            raise NonFiniteError(
                f"After step {self._methods.clock.step} the weights are not finite; they were not saved. "
                f"{self._advice()}"
            )
        state: dict[str, Any] = {
            **whole,
            "drivetrain": __version__,
            "run": self._name,
            "epoch": epoch,
            "step_in_epoch": step_in_epoch,
            "step": self._methods.clock.step,
            "strategy": self._plan.distribution.name,
            "facts": self._facts,
            "description": description(self._plan),
            "schedule": {"step": self._schedule.step},
            "loader": self._built.train.state_dict(),
            "history": self._records.history.to_dict(),
        }
        self._saver.save(self._methods.clock.step, part, state)

    def _step_now(self) -> int:
        """The number of the step that is being taken, from 1."""
        return self._methods.clock.step + 1

    def _advice(self) -> str:
        if self._saver is not None:
            self._saver.wait_a_moment()
        last = None if self._store is None else self._store.last(self._name)
        good = "There is no checkpoint before it." if last is None else f"The last good checkpoint is {last}."
        optimization = self._plan.optimization
        return (
            f"{good} Lower the learning rate ({optimization.describe()}), add a warm-up, set "
            f"clip_norm, or skip such steps with fit(on_nonfinite='skip')."
        )

    def _no_sums(self) -> Sums:
        return Sums(torch.zeros((), device=self._engine.device))
