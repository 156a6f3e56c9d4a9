"""Models that cannot be exported, or whose exported form computes something else. A module, because `--model` imports
it."""

import torch
from pipeline_data import CLASSES, batch_norm_model
from torch import nn

__all__ = ["Counting", "FixedBatch", "TwoOutputs", "batch_norm_model"]

CALLS: list[int] = []
"""An entry for each forward of `Counting`."""


class _Wrapped(nn.Module):
    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.layers = batch_norm_model(classes)


class Counting(_Wrapped):
    """Adds the number of calls, which an exporter takes for a constant."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return self.layers(images) + len(CALLS)


class FixedBatch(_Wrapped):
    """Uses the batch size as a number of Python."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.layers(images[n : n + 1]) for n in range(len(images))])


class TwoOutputs(_Wrapped):
    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layers(images), "mean": images.mean((1, 2, 3))}
