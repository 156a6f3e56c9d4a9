"""The forward of one optimizer step, and its loss: one mean over the microbatches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

from ..tasks.means import Count, Mean
from ..tasks.nests import map_tensors
from .hooks import Microbatch


def forward(model: Callable[..., Any], images: torch.Tensor, **inputs: torch.Tensor) -> Any:
    """Return the model's outputs for images `(B, 3, H, W)`; for views `(B, V, 3, H, W)`, outputs `(B, V, …)`.

    All views are one batch, so that BatchNorm has the statistics of all of them.
    """
    if images.dim() != 5:  # also of another kind of data, in a loop of one's own
        return model(images, **inputs)
    shape = images.shape[:2]
    outputs = model(images.flatten(0, 1), **inputs)
    return map_tensors(lambda output: output.view(*shape, *output.shape[1:]), outputs)


class Ranks(Protocol):
    """What a step needs of an `Engine`."""

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def reduce(self, value: torch.Tensor, op: Literal["mean", "sum"] = "mean") -> torch.Tensor: ...


class StepLoss:
    """The mean loss of a step, in shares whose mean over microbatches and ranks it is: Σ numerators / Σ denominators.

    Engines divide each share by the number of microbatches, and average the gradients of the ranks. If all denominators
    are known to be equal, a share is the mean of its microbatch, and nothing is computed or exchanged. Otherwise the
    ranks sum one number, on their devices. A step whose denominators are all 0 has a loss of 0, and zero gradients.

    `equal`: every rank's share of the batch is known to have equally many samples. `weight`: the sum of all
    denominators, by which an epoch's mean weights the step.
    """

    def __init__(self, mean: Mean, microbatches: Sequence[Microbatch], ranks: Ranks, *, equal: bool) -> None:
        self.mean = mean
        self._counts = [mean.denominator(targets) for _, targets in microbatches]
        self._scale: Count | None = None
        shares = len(self._counts) * ranks.world_size
        numbers = [count for count in self._counts if not isinstance(count, torch.Tensor)]
        if len(numbers) == len(self._counts) and (equal or ranks.world_size == 1):
            self.weight: Count = sum(numbers) * ranks.world_size
            if len(set(numbers)) > 1 or not numbers[0]:
                self._scale = shares / (self.weight or 1)
            return
        total = torch.stack([_on(ranks.device, count) for count in self._counts]).sum()
        self.weight = total if ranks.world_size == 1 else ranks.reduce(total, "sum")
        self._scale = shares / torch.where(self.weight > 0, self.weight, 1)

    def share(self, number: int, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return the share of microbatch `number` of this rank, counted from 1."""
        if self._scale is None:
            return self.mean.loss(outputs, targets)
        return self.mean.numerator(outputs, targets, self._counts[number - 1]) * self._scale


def _on(device: torch.device, count: Count) -> torch.Tensor:
    """Return a denominator as a tensor; a number is filled in, because a copy to the device could wait for it."""
    return count.detach() if isinstance(count, torch.Tensor) else torch.full((), count, device=device)
