"""The bytes that a rank holds for training: by formulas, and counted, to compare the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...common.rows import local_part

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


def shards_parameters(strategy: str) -> bool:
    return "parameters" in DIVIDES.get(strategy, "").split()


def adamw_bytes(strategy: str, ranks: int) -> tuple[float, float, float]:
    """Return `rank_bytes` of one parameter with AdamW in fp32."""
    return rank_bytes(strategy, ranks, 4.0, 4.0, 8.0)


def rank_bytes(
    strategy: str, ranks: int, parameters: float, gradients: float, optimizer: float
) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer that a rank holds of those of the full model, by ZeRO's
    formulas (Rajbhandari et al. 2020, arXiv:1910.02054). With `hsdp`, `ranks` is the size of one group."""
    divided = DIVIDES[strategy].split()
    copy = parameters if strategy.startswith("deepspeed") else 0.0  # of the weights, which it steps
    whole = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer + copy}
    own = {part: size / ranks if part in divided else size for part, size in whole.items()}
    return own["parameters"], own["gradients"], own["optimizer"]


def gathered_bytes(model: nn.Module, units: Sequence[nn.Module], width: int, *, until_backward: bool = False) -> int:
    """Return the bytes that FSDP2 holds beside its shards, at most, with gathered parameters of `width` bytes: those
    outside of the units, a unit and the next one (or all units, `until_backward`), a unit's gradients, and the fp32
    buffer that these are reduced from. The model may be on the meta device; inner units come first."""
    seen: set[nn.Parameter] = set()
    sizes = [0]
    for unit in units:
        own = set(unit.parameters()) - seen
        seen |= own
        sizes.append(sum(one.numel() for one in own))
    outside = sum(one.numel() for one in model.parameters() if one not in seen)
    largest = max(sizes) or outside
    around = sum(sizes) if until_backward else 2 * max(sizes)
    return width * (outside + around + largest) + 4 * largest


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
    storages = [local_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def tensors_in(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))
