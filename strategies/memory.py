"""What a rank keeps for training, in bytes: to hold a strategy's memory to its formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

ADAMW_BYTES = 16.0
"""Bytes per parameter of AdamW in fp32: 4 for the parameter, 4 for its gradient, 8 for the optimizer. A rank
keeps this where all is whole (single, ddp), and 1/N of it where N ranks divide all three (fsdp)."""


@dataclass(frozen=True)
class Held:
    """The tensors that one rank holds for training, on whatever device."""

    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    optimizer: Sequence[torch.Tensor]
    count: int
    """Parameters of the whole model."""


class HoldsTensors(Protocol):
    """What `held_bytes` needs of an engine."""

    def held(self) -> Held: ...


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that one rank holds between backward and step, on whatever device; activations are not counted."""

    parameters: int
    gradients: int
    optimizer: int
    count: int
    """Parameters of the whole model."""

    @property
    def per_parameter(self) -> float:
        """All three together, for each parameter of the whole model; to be compared with `ADAMW_BYTES`."""
        return (self.parameters + self.gradients + self.optimizer) / self.count


def held_bytes(engine: HoldsTensors) -> HeldBytes:
    """Counts what this rank holds now; no communication.

    Gradients are there only between the last `backward` and `step`, and most optimizers make their state in
    the first step: call it after the second step's `backward`. Memory that tensors share, such as DDP's
    buckets, counts once and whole. Padding counts too: FSDP2 rounds the first dimension up to the ranks.
    """
    held = engine.held()
    return HeldBytes(_bytes(held.parameters), _bytes(held.gradients), _bytes(held.optimizer), held.count)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [_own_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors_in(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state."""
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))
