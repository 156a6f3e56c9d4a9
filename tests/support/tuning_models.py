"""Models that need what is not there: more memory than a process gets, or an environment variable."""

import os
import signal

import torch
import torch.distributed as dist
from pipeline_data import CLASSES, plain_model
from torch import nn

TOO_MUCH = 1 << 55
"""Bytes that no machine has: the allocator refuses them at once."""


class Hungry(nn.Module):
    """Asks the allocator for too much memory in forwards of more than `most` images, on one rank, or on all (-1). If
    `killed`, the system kills the process instead, as Linux does when memory is short."""

    def __init__(self, classes: int = CLASSES, most: int = 4, rank: int = -1, *, killed: bool = False) -> None:
        super().__init__()
        self.layers, self.most, self.rank, self.killed = plain_model(classes), most, rank, killed

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        own = dist.get_rank() if dist.is_initialized() else 0
        if len(images) > self.most and self.rank in (-1, own):
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return self.layers(images)


class Informed(nn.Module):
    """A model that can only be built where an environment variable is set."""

    def __init__(self, classes: int = CLASSES, variable: str = "") -> None:
        super().__init__()
        if variable not in os.environ:
            raise RuntimeError(f"{variable} is not set")
        self.layers = plain_model(classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)
