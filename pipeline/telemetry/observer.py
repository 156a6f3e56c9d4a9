"""The interface of what observes a run: progress bar, loggers, checkpoints, guard and the ledger's clocks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

from ...transforms.common.moments import Follower
from .history import Epoch, Evaluation
from .state import TrainState


class Observer(Follower[TrainState]):
    """Base class of observers of a run: the moments of the loop, as for transforms, and those around it. Every rank
    calls the same methods in the same order. Losses and norms are tensors `()` on the device: reading one waits for it.
    At a moment, observers are called before transforms where time or a batch begins (`on_step_start`) and after a
    forward or backward, else after them."""

    def on_start(self, state: TrainState) -> None:
        """Called once, before the first step of a new or resumed run."""

    def flush(self) -> None:
        """Called before a checkpoint and after an epoch's last step, to process what is pending."""

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:
        """Called after each evaluation within an epoch (`state.meter.steps` > 0), and after the one of a run that was
        stopped where its last epoch had none."""

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        """Called after an epoch and its evaluation, if any; `state` already counts the epoch."""

    def on_end(self, *, failed: bool) -> None:
        """Called once when the run ends, even if it never started; `failed` if by an exception."""


class Observers(Observer):
    """Several observers as one, called in order. `on_end` reaches all of them, even if one raises."""

    def __init__(self, *observers: Observer) -> None:
        self._all = observers

    def calls(self, moment: str) -> Iterator[Callable[[Any], Any]]:
        return chain.from_iterable(observer.calls(moment) for observer in self._all)

    def on_start(self, state: TrainState) -> None:
        for observer in self._all:
            observer.on_start(state)

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
