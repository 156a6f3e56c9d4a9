"""The position of a run, which the loop advances, observers read, and checkpoints save."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...strategies import Engine
from ...transforms.common.moments import Loop
from ..tasks.nests import to_float


@dataclass
class EpochMeter:
    # This rank's losses times their weights, on the device.
    total: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    counted: int = 0  # steps in `total`
    skipped: int = 0  # further steps, whose loss was not finite
    overflowed: int = 0  # steps in `total` that the optimizer skipped because gradients overflowed in fp16
    images: int = 0  # over all ranks
    seconds: float = 0.0  # without evaluations
    data_wait_s: float = 0.0  # the part of `seconds` in which the loop waited for data
    evaluation_s: float = 0.0  # of evaluations within the epoch
    weight: torch.Tensor | float = 0.0  # the denominators of the steps' means, over all ranks
    earlier_images: int = 0  # of the epochs before this one
    earlier_seconds: float = 0.0
    replaced: int = 0  # samples that could not be decoded, over all ranks, before the run was resumed in this epoch

    @property
    def steps(self) -> int:
        return self.counted + self.skipped

    def add(self, loss: torch.Tensor, weight: torch.Tensor | float, *, overflowed: bool) -> None:
        if isinstance(weight, torch.Tensor):
            self.total += loss * weight
        else:
            self.total.add_(loss, alpha=weight)  # one operation
        self.weight = self.weight + weight
        self.counted += 1
        self.overflowed += overflowed

    def mean(self) -> torch.Tensor:
        """Return the mean loss of the steps on this rank; 0 if there are none, or if none of their targets counts."""
        if isinstance(self.weight, torch.Tensor):
            return self.total / torch.where(self.weight > 0, self.weight, 1)
        return self.total / (self.weight or 1)

    def state_dict(self, engine: Engine) -> dict[str, Any]:
        """Return the sums as JSON values, `total` as the mean over the ranks. Every rank must call it."""
        return {**vars(self), "total": engine.reduce(self.total).item(), "weight": float(self.weight)}


@dataclass
class TrainState(Loop):
    """The position of a run, the same on every rank, and what its current step has computed."""

    lr: float = 0.0  # of the first parameter group in the last step
    meter: EpochMeter = field(default_factory=EpochMeter)  # of the current epoch
    stop: str | None = None  # why training ends after the current step or epoch, agreed among all ranks

    @property
    def step_in_epoch(self) -> int:
        return self.meter.steps

    @property
    def images(self) -> int:
        """Those trained on in the full run, over all ranks."""
        return self.meter.earlier_images + self.meter.images

    @property
    def seconds(self) -> float:
        """Those of training in the full run, without evaluations."""
        return self.meter.earlier_seconds + self.meter.seconds

    def forward(self, images: torch.Tensor) -> Any:
        with self.engine.forward_context():
            return to_float(self.engine.model(images))

    def begin_epoch(self, device: torch.device) -> EpochMeter:
        """Return the meter of the current epoch: a new one, unless the run resumes within the epoch."""
        if not self.meter.steps:
            self.meter = replace(self.meter, total=torch.zeros((), device=device))
        return self.meter

    def end_epoch(self) -> None:
        self.steps_left_out += self.steps_per_epoch - self.epoch_steps
        self.epoch += 1
        self.meter = EpochMeter(earlier_images=self.images, earlier_seconds=self.seconds)
