"""Schedules that recipes and ranks name as module:attribute."""

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

not_callable = 3


def dip(progress: float, depth: float = 0.5) -> float:
    """Down to 1 - depth in the middle, and up again."""
    return 1 - depth * (1 - abs(1 - 2 * progress))


def steps(optimizer: torch.optim.Optimizer, size: int = 3) -> LRScheduler:
    return StepLR(optimizer, size, gamma=0.5)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """It changes the momentum, too."""
    return OneCycleLR(optimizer, 0.2, total_steps=8)
