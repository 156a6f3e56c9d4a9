"""Rows of tensors that are sharded along their first dimension as by `torch.chunk`, which FSDP2's DTensors are."""

from typing import Any

import torch


def chunk(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """Return the first row of a shard, and the one after its last: the shards of few rows are the first ones."""
    each = -(-rows // shards)
    return min(rows, shard * each), min(rows, (shard + 1) * each)


def shard_of(value: torch.Tensor) -> tuple[int, int] | None:
    """Return into how many shards the rows of a DTensor are divided, and which one this rank holds; None for a tensor
    that is not sharded, or not along its first dimension only."""
    tensor: Any = value
    if not hasattr(tensor, "device_mesh"):  # importing DTensor takes a second
        return None
    divided = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(divided) != 1 or not tensor.placements[divided[0]].is_shard(0):
        return None
    mesh = tensor.device_mesh
    return mesh.size(divided[0]), mesh.get_local_rank(divided[0])


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a DTensor, sharing memory; another tensor itself."""
    tensor: Any = value
    part: torch.Tensor = tensor.to_local() if hasattr(value, "device_mesh") else value
    return part
