"""The learning rate of each step of a run."""

from __future__ import annotations

import torch

from ..spec.config import OptimizerConfig


class Schedule:
    """Set the learning rate of each step.

    Args:
        optimization: defines the shape of the schedule.
        optimizer: the current learning rates of its parameter groups are the peaks.
        steps: optimizer steps of the full run.
    """

    def __init__(self, optimization: OptimizerConfig, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._optimization, self._optimizer, self._steps = optimization, optimizer, steps
        self._peaks = [group["lr"] for group in optimizer.param_groups]

    def set_lr(self, step: int) -> float:
        """Set the learning rates for step `step`, counted from 0. Return that of the first parameter group."""
        factor = self._optimization.lr_factor(step, self._steps)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return float(self._peaks[0] * factor)
