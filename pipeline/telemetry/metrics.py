"""Collect a run's metrics for the loggers without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import torch

from .history import Epoch, Evaluation
from .host_copy import HostCopy
from .loggers import Loggers
from .observer import Observer
from .state import TrainState


class Metrics(Observer):
    """Log every `every` steps and after each epoch. Without loggers, as on all ranks but 0, do nothing.

    A loss on a CUDA device is copied asynchronously and logged once it has arrived: at a later step, at the latest with
    the next entry.

    Args:
        chosen: loggers, from `loggers.check`.
        folder: folder of the run.
        every: optimizer steps between two entries.
    """

    def __init__(self, chosen: tuple[object, ...], folder: Path | None, every: int) -> None:
        self._chosen, self._folder, self._every = chosen, folder, every
        self._loggers = Loggers((), None, 0)
        self._late: tuple[int, dict[str, float], HostCopy] | None = None
        self._extra: list[tuple[int, list[str], HostCopy]] = []
        self._since = 0.0, 0, 0.0

    def on_start(self, state: TrainState) -> None:
        """Open the loggers; they continue after `state.step` steps."""
        self._loggers = Loggers(self._chosen, self._folder, state.step)

    def on_epoch_start(self, state: TrainState) -> None:
        """Exclude the time of the preceding evaluation from the next entry."""
        self._since = self._now(state)

    @staticmethod
    def _now(state: TrainState) -> tuple[float, int, float]:
        return perf_counter(), state.meter.images, state.meter.data_wait_s

    def log(self, values: Mapping[str, float | torch.Tensor], step: int) -> None:
        """Log additional values, numbers or tensors `()`, once they have arrived from the device."""
        if self._loggers and values:
            tensors = [torch.as_tensor(value).detach() for value in values.values()]
            device = next((one.device for one in tensors if one.device.type != "cpu"), torch.device("cpu"))
            stacked = torch.stack([one.to(device, torch.float64).reshape(()) for one in tensors])
            self._extra.append((step, list(values), HostCopy(stacked)))
            self._arrive_extra()

    def _arrive_extra(self, *, wait: bool = False) -> None:
        while self._extra and (wait or self._extra[0][2].arrived):
            step, names, copy = self._extra.pop(0)
            self._loggers.log(dict(zip(names, copy.values(), strict=True)), step)

    def on_evaluation_end(self, state: TrainState, evaluation: Evaluation) -> None:
        """Log an evaluation within an epoch; `on_epoch_end` logs that at its end."""
        if self._loggers and state.meter.steps:
            self._arrive()
            self._loggers.log(evaluation.results, state.step)
            self._since = self._now(state)

    def on_step_end(self, state: TrainState) -> None:
        """If an entry is due, log this rank's loss, the learning rate, and the throughput since the last entry."""
        if not self._loggers:
            return
        self._arrive_extra()
        if self._late is not None and self._late[2].arrived:
            self._arrive()
        if state.step % self._every:
            return
        before, self._since = self._since, self._now(state)
        seconds, done, waited = (now - then for now, then in zip(self._since, before, strict=True))
        values = {
            "step/lr": state.lr,
            "step/images_per_s": done / seconds,
            "step/data_wait_fraction": waited / seconds,
        }
        self._arrive()
        self._late = state.step, values, HostCopy(state.step_loss)
        if self._late[2].arrived:
            self._arrive()

    def _arrive(self) -> None:
        """Log the pending entry, waiting for its loss."""
        late, self._late = self._late, None
        if late is not None:
            step, values, loss = late
            self._loggers.log({"step/loss": loss.values(), **values}, step)

    def on_epoch_end(self, state: TrainState, epoch: Epoch) -> None:
        """Log the epoch."""
        if self._loggers:
            self._arrive()
            self._arrive_extra(wait=True)
            self._loggers.log(epoch.values(), state.step)

    def on_end(self, *, failed: bool) -> None:
        """Log what is pending, and close the loggers."""
        if not failed:
            self._arrive()
            self._arrive_extra(wait=True)
        self._loggers.close()
