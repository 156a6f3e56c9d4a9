"""The progress bar of an epoch, and the line printed at its end."""

import sys
from collections.abc import Mapping
from datetime import timedelta
from shutil import get_terminal_size
from time import perf_counter
from typing import Self, TextIO

import torch
from tqdm import tqdm as text_bar
from tqdm.auto import tqdm

from ...common.terminal import in_cell, is_interactive
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
        self._metric = best_by
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
            loss, waits = f"loss {self._loss.values():.4f}", f"waiting {waiting:.0%}"
            if in_cell():
                self._bar.set_postfix_str(", ".join(filter(None, (loss, self._metric, waits))), refresh=False)
            else:
                texts = {"loss": loss, "metric": self._metric, "waits": waits, "memory": _memory()}
                self._bar.bar_format = bar_format(len(self._bar.desc), texts, get_terminal_size().columns)
            self._loss = None
        self._bar.update(state.step_images)

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:  # noqa: ARG002
        if self._prints:
            echo(f"{evaluation}")
            self._metric = "".join(shown(evaluation.metrics, evaluation.units)[:1])

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        if self._prints:
            seconds = round((self._epochs - state.epoch) * epoch.seconds)
            echo(f"{epoch}  {timedelta(seconds=seconds)} left" if seconds else f"{epoch}")
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


_WIDTHS = {"percent": 4, "speed": 16, "left": 10}  # of what tqdm fills in
_FIELDS = {"percent": "{percentage:3.0f}%", "speed": "{rate_noinv_fmt}", "left": "{remaining} left"}
_WANTED = ("percent", "loss", "speed", "left", "memory", "metric", "waits")
_ORDER = ("percent", "loss", "metric", "speed", "left", "memory", "waits")
_SHORTEST = 8  # a bar


def bar_format(name: int, texts: Mapping[str, str], columns: int) -> str:
    """Return tqdm's format of a line that fits: after the name, of so many characters, as many of `_WANTED` as there is
    room for, the first ones first, and a bar in the rest."""
    room, kept = columns - name - 1, set[str]()
    for part in _WANTED:
        needed = _WIDTHS.get(part) or len(texts[part])
        if needed and needed + 2 > room:
            break
        if needed:
            room -= needed + 2
            kept.add(part)
    shown = [_FIELDS.get(part) or texts[part].replace("{", "{{").replace("}", "}}") for part in _ORDER if part in kept]
    bar = f"|{{bar:{room - 5}}}|" if room >= _SHORTEST + 5 else ""
    return "{desc}: " + "  ".join(filter(None, [*shown[:1], bar, *shown[1:]]))


def _memory() -> str:
    """Return the memory of the device that tensors take, at most so far; empty on a CPU."""
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return f"{peak / 2**30:.1f} GiB" if peak else ""


def progress_file(from_cell: bool) -> TextIO | None:
    """For a rank of a notebook's cell, standard output: standard error would be red there, and out of order."""
    return sys.stdout if from_cell and not in_cell() else None


def echo(text: str) -> None:
    """Print a line above any progress bar."""
    tqdm.write(text)
