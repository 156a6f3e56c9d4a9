"""What a rank keeps for training, in bytes: to hold a strategy's memory to its formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .base import Engine


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that one rank holds between two forwards, wherever they are; activations are not among them.

    With AdamW in fp32 a parameter takes 4 + 4 + 8 = 16 bytes where all is whole, 16/N where N ranks divide it.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


def held_bytes(engine: Engine) -> HeldBytes:
    """Counts what this rank holds now; no communication.

    Gradients are there only between the last `backward` and `step`, and most optimizers make their state in
    the first step: call it after the second step's `backward`. Memory that tensors share, such as DDP's
    buckets, counts once and whole, with its padding.
    """
    parameters = list(engine.plain_model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [
        value
        for values in engine.optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    return HeldBytes(_bytes(parameters), _bytes(gradients), _bytes(state))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [_local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, of a DTensor; else the tensor."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
