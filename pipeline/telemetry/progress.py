"""The progress bar of an epoch, and the line printed at its end."""

import sys
from datetime import timedelta
from time import perf_counter
from typing import Self, TextIO

from tqdm import tqdm as text_bar
from tqdm.auto import tqdm

from ...common.terminal import is_interactive
from .history import Epoch, Evaluation, shown
from .host_copy import HostCopy
from .observer import Observer
from .state import TrainState

_REFRESH = 0.5  # seconds between two losses, each an asynchronous copy from the device


class Progress(Observer):
    """A progress bar over the images of one epoch. `best_by` is the monitored metric after the previous one, as text;
    without a `file`, it is drawn in the terminal or the notebook cell. `show=False` has no cost."""

    def __init__(
        self, epoch: int, epochs: int, images: int, best_by: str = "", *, show: bool,
        file: TextIO | None = None,
    ) -> None:  # fmt: skip
        self._prints, self._next, self._epochs = show, 0.0, epochs
        self._show = show and (file is not None or is_interactive())
        self._loss: HostCopy | None = None
        self._metric = f", {best_by}" if best_by else ""
        self._bar = (tqdm if file is None else text_bar)(
            total=images, desc=f"epoch {epoch}/{epochs}", unit=" images", disable=not self._show, leave=False,
            mininterval=_REFRESH, dynamic_ncols=True, file=file,
        )  # fmt: skip

    def on_epoch_start(self, state: TrainState) -> None:
        """Advance past the images trained on before the run was interrupted."""
        if state.meter.images:
            self._bar.update(state.meter.images)
            self._bar.unpause()

    def on_step_end(self, state: TrainState) -> None:
        if not self._show:
            return
        if self._loss is None and perf_counter() >= self._next:
            self._next = perf_counter() + _REFRESH
            self._loss = HostCopy(state.step_loss)
        if self._loss is not None and self._loss.arrived:
            waiting = state.meter.data_wait_s / max(state.meter.seconds, 1e-9)
            text = f"loss {self._loss.values():.4f}{self._metric}, waiting {waiting:.0%}"
            self._bar.set_postfix_str(text, refresh=False)
            self._loss = None
        self._bar.update(state.step_images)

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:
        if self._prints and state.meter.steps:
            echo(f"{evaluation}")
            self._metric = "".join(f", {text}" for text in shown(evaluation.metrics, evaluation.units)[:1])

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        if self._prints:
            seconds = round((self._epochs - state.epoch) * epoch.seconds)
            echo(f"{epoch}  {timedelta(seconds=seconds)} left" if seconds else f"{epoch}")
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def in_cell() -> bool:
    return "ipykernel" in sys.modules


def progress_file(from_cell: bool) -> TextIO | None:
    """For a rank of a notebook's cell, standard output: standard error would be red there, and out of order."""
    return sys.stdout if from_cell and not in_cell() else None


def echo(text: str) -> None:
    """Print a line above any progress bar."""
    tqdm.write(text)
