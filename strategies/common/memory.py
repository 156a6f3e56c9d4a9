"""The bytes that a rank holds for training, to compare a strategy's memory with its formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..base import Engine

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
"""What a strategy shards across its ranks; each rank holds the rest in full."""


def adamw_bytes(strategy: str, ranks: int) -> tuple[float, float, float]:
    """Return the bytes per parameter of parameters, gradients and optimizer that a rank holds with AdamW in fp32, by
    ZeRO's formulas (Rajbhandari et al. 2020, arXiv:1910.02054). With `hsdp`, `ranks` is the size of one group."""
    divided = DIVIDES[strategy].split()
    copy = 4.0 if strategy.startswith("deepspeed") else 0.0  # of the weights, which it steps
    whole = {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0 + copy}
    own = {part: size / ranks if part in divided else size for part, size in whole.items()}
    return own["parameters"], own["gradients"], own["optimizer"]


@dataclass(frozen=True)
class HeldBytes:
    parameters: int  # bytes that one rank holds between backward and step, on any device, without activations
    gradients: int
    optimizer: int
    count: int  # parameters of the full model


def held_bytes(engine: Engine) -> HeldBytes:
    """Count what this rank holds now. Call it after the second step's `backward`: most optimizers create their state in
    the first step. Shared memory, such as DDP's buckets, counts once and in full, and FSDP2's padding counts too."""
    held = engine.held()
    return HeldBytes(_bytes(held.parameters), _bytes(held.gradients), _bytes(held.optimizer), held.count)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    # `to_local` is a DTensor's, whose class takes a second to import.
    own: Iterable[Any] = (tensor.detach() for tensor in tensors)
    storages = [(t.to_local() if hasattr(t, "to_local") else t).untyped_storage() for t in own]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def tensors_in(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))
