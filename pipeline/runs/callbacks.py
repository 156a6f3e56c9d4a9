"""Run the user's callbacks at a run's events, and let its ranks agree on errors and stops."""

import json
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch.distributed as dist

from ...common.checks import check_picklable
from ...common.errors import CheckpointError, DrivetrainError, PlanError
from ...strategies import Engine
from ..callbacks.callback import Callback, RunOptions, RunView
from ..describe.resolve import ResolvedPlan
from ..tasks.scales import scales
from ..telemetry.history import Epoch, Evaluation
from ..telemetry.observer import Observer
from ..telemetry.rank_times import RankClock
from ..telemetry.state import TrainState
from ..training.agreement import Exchange, broadcast_text
from .ranks import trains_here

STOP, FAILED = 1, 2
PATIENCE = 10.0  # seconds; longer than ranks that compute the same usually drift apart
States = dict[str, dict[str, Any]]


def run_options(plan: ResolvedPlan, logs: bool) -> RunOptions:
    names = () if plan.data.val is None else ("val_loss", *plan.task.names)
    known = scales(plan.task) if names else {}
    directions = {name: scale.higher_is_better for name, scale in known.items()}
    return RunOptions(names, logs, directions, starts_ranks=not trains_here(plan))


def check_callbacks(callbacks: Sequence[Callback], options: RunOptions, *, pickled: bool) -> None:
    """Raise PlanError for a callback that cannot work in this run, or be pickled, or whose state is not JSON."""
    for one in callbacks:
        one.check(options)
        if pickled:
            remedy = "Create in on_fit_start what cannot be pickled, or start the ranks with torchrun."
            check_picklable(f"callbacks: {type(one).__name__}", one, "the ranks", remedy, PlanError)
        try:
            state_of(one)
        except CheckpointError as error:
            raise PlanError(str(error)) from None


def check_measured(callbacks: Sequence[Callback], options: RunOptions, measured: Sequence[str]) -> None:
    """Check callbacks once more if evaluations lack a metric of the task: the default `top5`, of up to five classes."""
    names = tuple(name for name in options.metrics if name in ("val_loss", *measured))
    if names != options.metrics:
        for one in callbacks:
            one.check(replace(options, metrics=names))


def state_of(callback: Callback) -> dict[str, Any]:
    """Return a copy of a callback's state, which a thread may write while the callback continues."""
    state: Any = callback.state_dict()
    try:
        copied = json.loads(json.dumps(state))
    except (TypeError, ValueError, RecursionError):
        copied = None
    if not isinstance(state, dict) or copied != state:
        raise CheckpointError(
            f"{type(callback).__name__}.state_dict() returned {state!r:.100}, which is not a dict of JSON values: "
            "texts, finite numbers, booleans, None, lists, and dicts with texts as keys."
        )
    return dict(copied)


class RunCallbacks(Observer):
    """The callbacks of a run as one observer, on one rank. After each step (if one of them overrides `on_step_end`),
    evaluation and epoch, the ranks exchange whether a callback failed or asked for a stop: one reduction, of which CUDA
    ranks read a step's after the next, so that the device does not wait for the host. It has its own process group, on
    the CPU: another rank may be in a collective of its callback, which a failed one never joins. So a failed rank waits
    `PATIENCE` seconds for the others; then it raises its error alone, and the launcher ends the other ranks."""

    def __init__(
        self, callbacks: Sequence[Callback], engine: Engine, view: RunView, eval_every: int | None,
        evaluate: Callable[[], object], stop: Callable[[str], None], clock: RankClock | None, timeout: float,
    ) -> None:  # fmt: skip
        self._all, self._engine, self._view, self._clock = tuple(callbacks), engine, view, clock
        self._every, self._evaluate, self._stop = eval_every, evaluate, stop
        self._at_steps = any(type(one).on_step_end is not Callback.on_step_end for one in self._all)
        self._reads_late = engine.device.type == "cuda"
        self._saved: Mapping[str, Mapping[str, Any]] = {}
        self._failure: tuple[str, Exception] | None = None
        ranks = engine.world_size > 1 and len(self._all) > 0
        limit = timedelta(seconds=timeout)  # torch's own is half an hour
        self._group: Any = dist.new_group(backend="gloo", timeout=limit) if ranks else None
        self._late: Exchange | None = None
        self._open: list[Callback] = []  # those whose `on_fit_end` is due
        self._taken, self._agreed = False, ""

    def restore(self, states: Mapping[str, Mapping[str, Any]], history: Sequence[Epoch]) -> list[str]:
        """Use these states from a checkpoint, by class name, and its finished epochs. Return the names of those without
        a callback here."""
        self._saved, self._view._history = states, tuple(history)
        return sorted(set(states) - {type(one).__name__ for one in self._all})

    def states(self) -> States:
        states = {type(one).__name__: state_of(one) for one in self._all}
        return {name: state for name, state in states.items() if state}

    def on_start(self, state: TrainState) -> None:  # noqa: ARG002
        self._open = [*self._all]
        self._call("on_fit_start")
        for one in self._all:
            if type(one).__name__ in self._saved and self._failure is None:
                self._guarded(one, "load_state_dict", self._saved[type(one).__name__])
        self._agree()

    def after_gradients(self, state: TrainState) -> None:
        """Copy the gradients before transforms clip them, in `before_step`."""
        if self._at_steps and self._failure is None and self._needs_gradients(state.step + 1):
            self._view._gradients = self._engine.gradients()

    def _needs_gradients(self, step: int) -> bool:
        """Raise an error at once, on this rank alone, unlike those of events: some strategies gather gradients on all
        ranks together, and this rank would have to know whether the others do."""
        answers = [self._guarded(one, "needs_gradients", step) for one in self._all]
        if self._failure is None:
            return any(answers)
        if self._engine.world_size == 1:
            raise self._failure[1]
        raise DrivetrainError(self._describe_failure()) from self._failure[1]

    def before_step(self, state: TrainState) -> None:  # noqa: ARG002
        self._taken = True

    def on_step_end(self, state: TrainState) -> None:
        ends = state.meter.steps >= state.epoch_steps
        self._view._loss, taken, self._taken = state.step_loss, self._taken, False
        if self._at_steps:
            if self._view._gradients is None or not taken or state.overflowed:
                needed = self._failure is None and self._needs_gradients(state.step)
                self._view._gradients = {} if needed else None  # the step was skipped
            self._call("on_step_end")
            self._view._gradients = None
        due = self._every is not None and state.step % self._every == 0 and not ends
        if due:
            if self._at_steps:
                self._send()
            self._evaluate()
        if due or self._at_steps:
            self._agree(late=self._reads_late and not due)
        if self._agreed and not ends:
            self._end(state)

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:  # noqa: ARG002
        self._view._metrics = dict(evaluation.results)
        self._call("on_evaluation_end")
        self._send()

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        if not self._all:
            return
        self._view._history = (*self._view._history, epoch)
        self._call("on_epoch_end")
        self._agree()
        if self._agreed and state.epoch < self._view.epochs:
            self._end(state)

    def finish(self) -> States:
        self._view._may_stop = False
        while self._open and self._failure is None:  # `fail` calls those after one that failed
            self._guarded(self._open.pop(0), "on_fit_end", self._view)
        self._agree()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        return self.states()

    def fail(self) -> None:
        """Call `on_fit_end` after a failure, without the other ranks; the run's error matters more than theirs."""
        self._view._failed = True
        for one in self._open:
            try:
                one.on_fit_end(self._view)
            except Exception as error:
                warnings.warn(
                    f"{type(one).__name__}.on_fit_end failed after the run: {type(error).__name__}: {error}",
                    stacklevel=2,
                )

    def _end(self, state: TrainState) -> None:
        state.stop = self._agreed
        self._stop(self._agreed)
        self._agree()  # on errors in the evaluation of a run that is stopped

    def _call(self, event: str) -> None:
        self._view._may_stop = event != "on_fit_start"
        for one in self._all:
            if self._failure is None:  # other ranks learn of it in `_agree`
                self._guarded(one, event, self._view)

    def _guarded(self, one: Callback, event: str, argument: object) -> Any:
        try:
            return getattr(one, event)(argument)
        except Exception as error:
            self._failure = self._failure or (f"{type(one).__name__}.{event}", error)
            return None

    def _agree(self, *, late: bool = False) -> None:
        if not self._all:
            return
        exchange = self._send()
        if exchange is None:
            codes: list[float] = [self._code]
        else:
            read = self._late if late else exchange
            self._late = exchange if late else None
            if read is None:
                return
            start = perf_counter()
            codes = read.values()
            if self._clock is not None:
                self._clock.waited(perf_counter() - start)
        if FAILED in codes:
            self._raise(codes.index(FAILED))
        if STOP in codes and not self._agreed:
            self._agreed = broadcast_text(self._engine, self._view._reason or "", codes.index(STOP))

    @property
    def _code(self) -> int:
        return FAILED if self._failure else STOP if self._view._reason else 0

    def _send(self) -> Exchange | None:
        """If a callback failed, wait until the others have sent: before that, one may be in a collective of its own."""
        if self._group is None:
            return None
        exchange = Exchange(self._group, self._code)
        if self._failure is not None and not exchange.arrives_within(PATIENCE):
            raise DrivetrainError(
                f"{self._describe_failure()}\nThe other ranks did not get through the same event within {PATIENCE:g} s."
            ) from self._failure[1]
        return exchange

    def _describe_failure(self) -> str:
        assert self._failure is not None
        event, error = self._failure
        trace = "".join(traceback.format_exception(error))
        return f"{event} failed on rank {self._engine.rank}: {type(error).__name__}: {error}\n\n{trace}"

    def _raise(self, rank: int) -> None:
        """Raise the failure of `rank`: in a single process unchanged, else with its traceback in the message."""
        if self._engine.world_size == 1 and self._failure is not None:
            raise self._failure[1]
        text, cause = "", None if self._failure is None else self._failure[1]
        if self._failure is not None and self._engine.rank == rank:
            text = self._describe_failure()
        raise DrivetrainError(broadcast_text(self._engine, text, rank)) from cause
