"""The protocol for following a run: the bar, the loggers, checkpoints, the guard and the ledger's clocks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

import torch

from .history import Epoch
from .state import TrainState

Phase = Literal["forward", "backward", "step", "other"]
"""What a step is doing; the forwards of batch methods are "forward", the loss and SAM's perturbation "other"."""


class Observer:
    """Follow a run. Each method does nothing; override those of interest.

    Every rank calls the same methods in the same order. A loss or a norm `()` is still on its device: to read it
    is to wait for the device.
    """

    def on_start(self, state: TrainState) -> None:
        """Called once, before the first step of a run or of what is left of it."""

    def on_epoch_start(self, state: TrainState) -> None:
        """Called before the first step of an epoch, or of what is left of it."""

    def on_step_start(self, state: TrainState) -> None:
        """Called before the forward of step `state.step + 1`."""

    def on_phase(self, phase: Phase) -> None:
        """Called when a step enters a phase; it may enter one that it is in already."""

    def should_step(self, state: TrainState, loss: torch.Tensor) -> bool:  # noqa: ARG002
        """Return whether the optimizer may step with this loss; the answer is the same on every rank."""
        return True

    def on_optimizer_step(self, state: TrainState, norm: torch.Tensor | None, skipped: bool) -> None:
        """Called with what the optimizer's step returned: the gradients' norm, if any, and `Engine.skipped`."""

    def on_step_end(self, state: TrainState, loss: torch.Tensor, images: int) -> None:
        """Called after step `state.step` with its loss on this rank and its images over all ranks."""

    def flush(self) -> None:
        """Called before a checkpoint and after an epoch's last step: look at what was not looked at yet."""

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        """Called after an epoch's evaluation; `state` has counted the epoch."""

    def on_end(self, *, failed: bool) -> None:
        """Called once at the end of the run, also of one that never started; `failed` if by an exception."""


class Observers(Observer):
    """Several observers as one, called in order; all of them at the end, even if one raises."""

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

    def on_optimizer_step(self, state: TrainState, norm: torch.Tensor | None, skipped: bool) -> None:
        for observer in self._all:
            observer.on_optimizer_step(state, norm, skipped)

    def on_step_end(self, state: TrainState, loss: torch.Tensor, images: int) -> None:
        for observer in self._all:
            observer.on_step_end(state, loss, images)

    def flush(self) -> None:
        for observer in self._all:
            observer.flush()

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        for observer in self._all:
            observer.on_epoch_end(state, epoch)

    def on_end(self, *, failed: bool) -> None:
        with ExitStack() as stack:
            for observer in reversed(self._all):
                stack.callback(observer.on_end, failed=failed)
