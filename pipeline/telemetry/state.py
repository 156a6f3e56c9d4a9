"""The position of a run: one record that the loop advances, observers read, and a checkpoint keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...strategies import Engine


@dataclass
class EpochMeter:
    """Sums over the steps of one epoch.

    Attributes:
        total: the losses of this rank's counted steps, on the device.
        counted: steps in `total`.
        overflowed: counted steps that the optimizer skipped because fp16's gradients overflowed.
        skipped: further steps, whose loss was not finite.
        images: over all ranks.
        seconds: of training.
        data_wait_s: seconds of these in which the loop waited for data.
    """

    total: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    counted: int = 0
    skipped: int = 0
    overflowed: int = 0
    images: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of the epoch that are done."""
        return self.counted + self.skipped

    def state_dict(self, engine: Engine) -> dict[str, Any]:
        """Return the sums as JSON values, `total` as the mean over the ranks. Every rank must call it."""
        return {**vars(self), "total": engine.reduce(self.total).item()}


@dataclass
class TrainState:
    """The position of a run, the same on every rank.

    Attributes:
        total_steps: optimizer steps of the full run.
        epoch: finished epochs.
        step: optimizer steps done, skipped ones included.
        lr: learning rate of the last step, of the first parameter group.
        meter: of the current epoch; its `steps` are the position within it.
    """

    total_steps: int = 1
    epoch: int = 0
    step: int = 0
    lr: float = 0.0
    meter: EpochMeter = field(default_factory=EpochMeter)

    @property
    def progress(self) -> float:
        """The share of the training that is done, 0 to 1."""
        return self.progress_at(self.step)

    @property
    def epoch_start(self) -> int:
        """The step before which the current epoch began."""
        return self.step - self.meter.steps

    def progress_at(self, step: float) -> float:
        """Return the share of the training, 0 to 1, that is done after so many steps."""
        return min(step / max(self.total_steps, 1), 1.0)

    def begin_epoch(self, device: torch.device) -> EpochMeter:
        """Return the meter of the current epoch: a new one, unless the run resumes within the epoch."""
        if not self.meter.steps:
            self.meter = EpochMeter(torch.zeros((), device=device))
        return self.meter

    def end_epoch(self) -> None:
        """Count the epoch."""
        self.epoch, self.meter = self.epoch + 1, EpochMeter()
