"""The figures of a run on their way to the loggers: taken after steps without holding up the device."""

from __future__ import annotations

from dataclasses import asdict
from time import perf_counter

import torch

from .history import Epoch
from .host_copy import HostCopy
from .loggers import Loggers
from .meter import Sums


class Metrics:
    """Logs every `every` steps and after each epoch; on ranks without loggers it does nothing.

    A loss on a CUDA device is copied behind the queued work, and logged when it has arrived: at a later step, at
    the latest with the next entry.

    Args:
        loggers: where the figures go.
        every: optimizer steps between two entries.
    """

    def __init__(self, loggers: Loggers, every: int) -> None:
        self._loggers, self._every = loggers, every
        self._late: tuple[int, dict[str, float], HostCopy] | None = None
        self._since = self._now(None)

    @staticmethod
    def _now(sums: Sums | None) -> tuple[float, int, float]:
        return perf_counter(), 0 if sums is None else sums.images, 0.0 if sums is None else sums.waited

    def begin_epoch(self, sums: Sums) -> None:
        """The time before this, of an evaluation, is not of the next entry."""
        if self._loggers:
            self._since = self._now(sums)

    def after_step(self, step: int, loss: torch.Tensor, lr: float, sums: Sums) -> None:
        """After step number `step`, from 1: its loss `()` on this rank, its learning rate, the epoch's sums."""
        if not self._loggers:
            return
        if self._late is not None and self._late[2].arrived:
            self._arrive()
        if step % self._every:
            return
        before, self._since = self._since, self._now(sums)
        seconds, images, waited = (now - then for now, then in zip(self._since, before, strict=True))
        values = {"step/lr": lr, "step/images_per_s": images / seconds, "step/waiting": waited / seconds}
        self._arrive()
        self._late = step, values, HostCopy(loss)
        if self._late[2].arrived:
            self._arrive()

    def _arrive(self) -> None:
        """Logs the loss that is still on its way."""
        late, self._late = self._late, None
        if late is not None:
            step, values, loss = late
            self._loggers.log({"step/loss": loss.values(), **values}, step)

    def after_epoch(self, step: int, epoch: Epoch) -> None:
        """After the epoch's evaluation, `step` steps of the training being done."""
        if self._loggers:
            self._arrive()
            self._loggers.log(
                {name: value for name, value in asdict(epoch).items() if value is not None}, step
            )

    def close(self) -> None:
        """Ends what was started."""
        self._loggers.close()
