"""Tensors of a model in training: shards (FSDP2's DTensors), and norms."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...common.errors import PlanError
from ...common.rows import is_dtensor


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, or this rank's shard of each, sharing memory. Call it without gradients."""
    return [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all tensors together, sharded or not; the same on every rank, float32, ()."""
    norms: list[Tensor] = []
    for group in ([t for t in tensors if not is_dtensor(t)], [t for t in tensors if is_dtensor(t)]):
        if group:
            norm = torch.nn.utils.get_total_norm(group)
            norms.append((norm.full_tensor() if is_dtensor(norm) else norm).float())
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def with_gradients(owner: object, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have a gradient; if none has, raise an error: `owner` would silently do nothing."""
    selected = [parameter for parameter in parameters if parameter.grad is not None]
    if not selected:
        raise PlanError(
            f"{type(owner).__name__}: no parameter has a gradient. Call it between the backward pass and the "
            "optimizer step, with a strategy that leaves gradients on the parameters (DeepSpeed does not)."
        )
    return selected
