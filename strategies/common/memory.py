"""What a rank keeps for training, in bytes: to hold a strategy's memory to its formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

ADAMW_BYTES = 16.0
"""Bytes per parameter of AdamW in fp32: 4 for the parameter, 4 for its gradient, 8 for the optimizer."""

DIVIDES = {
    "single": "",
    "dp": "",
    "ddp": "",
    "zero_redundancy": "optimizer",
    "fairscale_oss": "optimizer",
    "fairscale_sharded_ddp": "gradients optimizer",
    "fsdp": "parameters gradients optimizer",
    "fsdp_grad_op": "parameters gradients optimizer",
    "fsdp_cpu_offload": "parameters gradients optimizer",
    "hsdp": "parameters gradients optimizer",
    "deepspeed_stage_1": "gradients optimizer",  # its engine frees what it does not step, as stage 2 does
    "deepspeed_stage_2": "gradients optimizer",
    "deepspeed_stage_3": "parameters gradients optimizer",
}
"""What the ranks of a strategy divide among them; the rest each of them has whole."""


def adamw_bytes(strategy: str, ranks: int) -> tuple[float, float, float]:
    """Bytes per parameter of parameters, gradients and optimizer that a rank keeps with AdamW in fp32.

    ZeRO's formulas (Rajbhandari et al. 2020, arXiv:1910.02054). Under `hsdp`, `ranks` are those of one group.
    DeepSpeed steps a copy of the weights, which counts with the optimizer.
    """
    divided = DIVIDES[strategy].split()
    copy = 4.0 if strategy.startswith("deepspeed") else 0.0
    whole = {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0 + copy}
    parameters, gradients, optimizer = (
        size / ranks if part in divided else size for part, size in whole.items()
    )
    return parameters, gradients, optimizer


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
    # Of a DTensor, whose class takes a second to import.
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def tensors_in(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state."""
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))
