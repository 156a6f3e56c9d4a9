"""Save checkpoints at the end of each epoch, and every few steps if requested."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ...common.errors import NonFiniteError
from ..checkpoints.content import CheckpointContent
from ..checkpoints.format import Part
from ..checkpoints.state import all_finite
from ..checkpoints.writer import CheckpointWriter
from ..telemetry.history import Epoch
from ..telemetry.observer import Observer
from ..telemetry.state import TrainState
from ..training.build import Built
from ..training.guard import NonFiniteGuard
from ..training.requests import Requests


class SaveCheckpoints(Observer):
    """Save the state of a run.

    Args:
        built: what `build` returned.
        writer: writes the files.
        every_steps: optimizer steps between two checkpoints within an epoch; None: only at its end.
        capture: returns this rank's part of a checkpoint, and the checkpoint's content.
        guard: checks the weights before a checkpoint within an epoch.
        advice: returns the end of an error message.
        requests: of checkpoints by time, and to stop.
    """

    def __init__(
        self,
        built: Built,
        writer: CheckpointWriter,
        every_steps: int | None,
        capture: Callable[[], tuple[Part, CheckpointContent]],
        guard: NonFiniteGuard,
        advice: Callable[[], str],
        requests: Requests,
    ) -> None:
        self._built, self._writer, self._every = built, writer, every_steps
        self._capture, self._guard, self._advice, self._requests = capture, guard, advice, requests

    def on_step_end(self, state: TrainState) -> None:
        """Save within the epoch when due, or if the run is stopped there; `on_epoch_end` saves at its end, after the
        evaluation, for which a request to stop does not wait."""
        due = self._every is not None and state.step % self._every == 0
        within = state.meter.steps < len(self._built.train)
        if self._requests.stop or (within and (due or state.stop is not None or self._requests.save)):
            self._guard.check_weights(state)
            self._save(state)

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:  # noqa: ARG002
        """Save."""
        self._save(state)

    def on_end(self, *, failed: bool) -> None:
        """Wait for pending writes; after a failure, only briefly and without the other ranks."""
        with ExitStack() as stack:
            interrupted = isinstance(sys.exception(), KeyboardInterrupt)
            stack.callback(self._writer.give_up, interrupted=interrupted)
            if not failed:
                self._writer.close()
                stack.pop_all()

    def _save(self, state: TrainState) -> None:
        engine = self._built.engine
        part, content = self._capture()
        bad = torch.tensor(float(not all_finite(part, engine.plain_model)))
        if engine.reduce(bad, "sum").item():  # each rank checks what it writes
            raise NonFiniteError(
                f"After step {state.step} the weights are not finite; they were not saved. {self._advice()}"
            )
        self._writer.save(part, content)
        self._requests.saved()
