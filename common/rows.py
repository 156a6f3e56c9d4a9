"""Shards of tensors as by `torch.chunk`: of their rows, which FSDP2's DTensors are, or of their elements."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch


@dataclass(frozen=True)
class FlatShard:
    """The elements that this rank holds of a tensor that is flattened and then sharded as by `torch.chunk`, as in
    DeepSpeed's third stage. It takes the place of a DTensor in what an engine exports as held."""

    read: Callable[[], torch.Tensor]  # returns them, of shape (elements,), where possible sharing memory
    shape: torch.Size  # of the full tensor
    shards: int
    shard: int


def chunk(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """Return the first row of a shard, and the one after its last: the shards of few rows are the first ones."""
    each = -(-rows // shards)
    return min(rows, shard * each), min(rows, (shard + 1) * each)


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[Any]:
    """Whether the tensor is a shard of a larger one. Importing its class takes a second, and a distributed build."""
    return hasattr(tensor, "device_mesh")


def shard_of(value: torch.Tensor) -> tuple[int, int] | None:
    """Return into how many shards a DTensor's rows, or the elements of a `FlatShard`, are divided, and which one this
    rank holds; None for a tensor that is not sharded, or not along its first dimension only."""
    tensor: Any = value
    if isinstance(tensor, FlatShard):
        return tensor.shards, tensor.shard
    if not is_dtensor(tensor):
        return None
    divided = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(divided) != 1 or not tensor.placements[divided[0]].is_shard(0):
        return None
    mesh = tensor.device_mesh
    return mesh.size(divided[0]), mesh.get_local_rank(divided[0])


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a DTensor or a `FlatShard`, sharing memory; another tensor itself."""
    tensor: Any = value
    if isinstance(tensor, FlatShard):
        return tensor.read()
    part: torch.Tensor = tensor.to_local() if is_dtensor(value) else value
    return part
