"""The interface of what observes a run: progress bar, loggers, checkpoints, guard and the ledger's clocks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

import torch

from .history import Epoch, Evaluation
from .state import TrainState

Phase = Literal["transforms", "forward", "loss", "backward", "step", "hooks", "other"]
"""What a step is doing. "transforms" are those of batches, with their forwards; "hooks" what other transforms do around
the optimizer's step, such as SAM's perturbation, clipping, and averages; "other" is the rest of the loop."""


class Observer:
    """Base class of observers of a run. Each method does nothing; override those of interest.

    Every rank calls the same methods in the same order. Losses and norms are tensors `()` on the device: reading one
    waits for the device.
    """

    def on_start(self, state: TrainState) -> None:
        """Called once, before the first step of a new or resumed run."""

    def on_epoch_start(self, state: TrainState) -> None:
        """Called before the first step of a new or resumed epoch."""

    def on_step_start(self, state: TrainState) -> None:
        """Called before the forward of step `state.step + 1`."""

    def on_phase(self, phase: Phase) -> None:
        """Called when a step enters a phase, possibly the one it is already in."""

    def should_step(self, state: TrainState, loss: torch.Tensor) -> bool:  # noqa: ARG002
        """Return whether the optimizer may step with this loss; must be the same on every rank."""
        return True

    def should_apply(self, state: TrainState) -> bool:  # noqa: ARG002
        """Return whether the optimizer may step with the gradients; must be the same on every rank."""
        return True

    def on_optimizer_step(self, state: TrainState, norm: torch.Tensor | None, skipped: bool) -> None:
        """Called after the optimizer's step with the gradient norm, if any, and `Engine.skipped`."""

    def on_step_end(self, state: TrainState, loss: torch.Tensor, images: int) -> None:
        """Called after step `state.step` with its loss on this rank and its images over all ranks."""

    def flush(self) -> None:
        """Called before a checkpoint and after an epoch's last step, to process what is pending."""

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:
        """Called after each evaluation, within an epoch (`state.meter.steps` is above 0) or at its end; the model has
        the weights that were evaluated."""

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        """Called after an epoch and its evaluation, if any; `state` already counts the epoch."""

    def on_end(self, *, failed: bool) -> None:
        """Called once when the run ends, even if it never started; `failed` if by an exception."""


class Observers(Observer):
    """Several observers as one, called in order. `on_end` reaches all of them, even if one raises."""

    def __init__(self, *observers: Observer) -> None:
        self._all = observers

    def on_start(self, state: TrainState) -> None:
        for observer in self._all:
            observer.on_start(state)

    def on_epoch_start(self, state: TrainState) -> None:
        for observer in self._all:
            observer.on_epoch_start(state)

    def on_step_start(self, state: TrainState) -> None:
        for observer in self._all:
            observer.on_step_start(state)

    def on_phase(self, phase: Phase) -> None:
        for observer in self._all:
            observer.on_phase(phase)

    def should_step(self, state: TrainState, loss: torch.Tensor) -> bool:
        answers = [observer.should_step(state, loss) for observer in self._all]
        return all(answers)

    def should_apply(self, state: TrainState) -> bool:
        answers = [observer.should_apply(state) for observer in self._all]
        return all(answers)

    def on_optimizer_step(self, state: TrainState, norm: torch.Tensor | None, skipped: bool) -> None:
        for observer in self._all:
            observer.on_optimizer_step(state, norm, skipped)

    def on_step_end(self, state: TrainState, loss: torch.Tensor, images: int) -> None:
        for observer in self._all:
            observer.on_step_end(state, loss, images)

    def flush(self) -> None:
        for observer in self._all:
            observer.flush()

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:
        for observer in self._all:
            observer.on_evaluation_end(state, evaluation)

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        for observer in self._all:
            observer.on_epoch_end(state, epoch)

    def on_end(self, *, failed: bool) -> None:
        with ExitStack() as stack:
            for observer in reversed(self._all):
                stack.callback(observer.on_end, failed=failed)
