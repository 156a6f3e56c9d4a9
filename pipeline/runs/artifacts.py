"""The job of a run, the result of a rank, and the artifacts of a run other than checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from ...common.model_state import ModelState, in_memory
from ...common.signals import interrupts_held
from ...common.storage.tensors import Tensors
from ..describe.inputs import metadata
from ..telemetry.history import HISTORY, Epoch, Evaluation, History, StepPoint, read_history
from ..telemetry.host_copy import HostCopy
from ..telemetry.observer import Observer
from ..telemetry.progress import echo
from ..telemetry.state import TrainState
from .checkpoints.weights import load_model, open_model, save_model
from .config import FitConfig
from .folder import MODEL, clear_gauges, clear_results, draw_curves, with_trained, write

PICTURE = 30.0  # seconds between two plots of the curves
POINTS = 1000  # steps whose losses are kept for the curves: as many as a picture is wide
Weights = Callable[[], ModelState]
"""Gathers the tensors used in evaluation, by plain names; empty on ranks that do not keep them."""


@dataclass(frozen=True, kw_only=True)
class FitJob(FitConfig):
    """The validated options of `fit`, with `epochs` and loggers resolved, and what ranks need in addition."""

    epochs: int
    resume: str | Path | None = None
    logger: tuple[object, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)  # files for the folder, by name
    in_cell: bool = False  # whether `fit` was called in a notebook
    plan: str = ""  # printed by rank 0 once everything is built and checked
    # Whether the ranks existed before the call, so that every rank returns the result to its caller.
    each_rank: bool = False

    @property
    def saves(self) -> bool:
        return self.folder is not None and self.checkpoints is not None

    def on_each_rank(self, epoch: int) -> bool:
        """Whether every rank keeps the weights after this epoch."""
        return self.each_rank and epoch >= self.epochs


@dataclass
class RankResult:
    """The result of a rank. Only ranks that return weights to a caller have them: rank 0; with `FitJob.each_rank`, all
    ranks at the end of training."""

    state: ModelState = field(default_factory=ModelState)  # after the last epoch, on the CPU, by plain names
    history: History = field(default_factory=History)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)  # states at the end, by class name


class RunArtifacts(Observer):
    """History and weights, in memory and in the run's folder. Every rank has one, which updates its `outcome` after
    each epoch; only rank 0, the `lead`, writes and prints."""

    def __init__(
        self, job: FitJob, outcome: RankResult, lead: bool, facts: dict[str, Any], steps: int
    ) -> None:  # fmt: skip
        """`steps` are those of the full run."""
        self._job, self._outcome, self._lead = job, outcome, lead
        self._every = -(-steps // POINTS)
        self._pending: list[tuple[float, float, HostCopy]] = []
        self._folder = job.folder if lead else None
        self._next_picture = perf_counter() + PICTURE
        self._of_weights: dict[str, Any] = {}  # facts of a stop, while the folder has its weights
        self._apart = False  # whether the history there, and its weights, are of another epoch than this one
        outcome.history = History([], facts)

    @property
    def history(self) -> History:
        return self._outcome.history

    def clear(self) -> None:
        if self._folder is not None:
            clear_results(self._folder)

    def clear_gauges(self) -> None:
        """Remove the gauges of a run that continues without them: they would stay those of the step where it was left,
        for `drivetrain watch`, too."""
        if self._folder is not None and "prometheus" not in self._job.logger:
            clear_gauges(self._folder)

    def on_start(self, state: TrainState) -> None:  # noqa: ARG002
        if self._folder is not None:
            write(self._folder, with_trained(self._job.texts, self.history.facts))

    def on_step_end(self, state: TrainState) -> None:
        if self._lead and state.step % self._every == 0:
            at = round(state.position / state.steps_per_epoch, 4)
            self._pending.append((at, state.lr, HostCopy(state.step_loss)))

    def flush(self) -> None:
        if self._pending:
            points = (StepPoint(at, copy.values(), lr) for at, lr, copy in self._pending)
            finite = [point for point in points if math.isfinite(point.loss)]  # of a skipped step, JSON has none
            self._outcome.history = replace(self.history, steps=[*self.history.steps, *finite])
            self._pending = []

    def keep(self, history: History, weights: Weights) -> None:
        """Store weights and history after an epoch, or where the run was stopped. Every rank must call it."""
        with interrupts_held():
            self._outcome.state = ModelState()  # release the old weights before gathering: one copy at a time
            state = weights()
            if self._folder is not None and history.moment != "0":
                save_model(state, self._folder / MODEL, epochs=history.moment, about=metadata(history.facts))
                history.save(self._folder / HISTORY)
                self._of_weights, self._apart = {}, False
                if isinstance(state.weights, Tensors):  # they were gathered or read for the file
                    state = open_model(self._folder / MODEL)
            self._outcome.history = history
            self._outcome.state = in_memory(state)

    def add(self, epoch: Epoch, weights: Weights) -> None:
        self.keep(replace(self.history, epochs=[*self.history.epochs, epoch]), weights)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self._outcome.history = replace(self.history, evaluations=[*self.history.evaluations, evaluation])
        if self._folder is not None and not self._apart:
            self._with_weights.save(self._folder / HISTORY)

    @property
    def _with_weights(self) -> History:
        return replace(self.history, facts=self.history.facts | self._of_weights)

    def add_straggler(self, straggler: dict[str, Any]) -> None:
        known = self.history.facts.get("stragglers", [])
        facts = {**self.history.facts, "stragglers": [*known, straggler]}
        self._outcome.history = replace(self.history, facts=facts)

    def resume(self, history: History) -> None:
        """Restore the finished epochs, with weights if the run's folder has those of the same epochs."""
        self._outcome.history = history
        saved = None if self._folder is None else read_history(self._folder)
        if self._folder is None or saved is None:
            return
        if "stopped" in saved.facts:  # the weights stay those of the stop until the next epoch ends
            self._of_weights = {"stopped": saved.facts["stopped"], "continued": True}
            replace(saved, facts=saved.facts | self._of_weights).save(self._folder / HISTORY)
        # Of a run that was killed after an epoch, before its checkpoint: both stay until that epoch has ended again.
        self._apart = saved.moment != self._with_weights.moment
        if history.epochs and saved.epochs == history.epochs:
            self._outcome.state = load_model(self._folder / MODEL, epochs=history.moment)

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:  # noqa: ARG002
        """Draw the curves so far, at most every `PICTURE` seconds: it takes a fifth of a second."""
        if self._folder is not None and perf_counter() > self._next_picture:
            draw_curves(self._folder)
            self._next_picture = perf_counter() + PICTURE

    def echo(self, text: str) -> None:
        if self._lead and self._job.progress:
            echo(text)
