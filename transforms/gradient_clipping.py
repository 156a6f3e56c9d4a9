"""GradientClipping: gradients bounded by their norm, their values, or their weights' norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import nn

from ..errors import PlanError
from .base import Kind, Transform
from .common.checks import check_choice, check_range
from .common.tensors import is_dtensor, with_gradients

By = Literal["norm", "value", "adaptive"]
SMALLEST_WEIGHT = 1e-3
"""Weights of a smaller norm count as this large, else those that start at 0 could never move: the
source's epsilon. Composer has none, and its biases that start at 0 stay there."""


@dataclass(frozen=True)
class GradientClipping(Transform):
    """Bounds the gradients between the backward and the optimizer's step.

    DeepSpeed takes the gradients away, and FairScale's ShardedDDP leaves each on one rank only, where a norm of
    the rest is silently another: use the strategies' own clipping there.

    Attributes:
        by: `"norm"`: the 2-norm of all gradients together is at most the threshold. `"value"`: each element
            lies within ± threshold. `"adaptive"`: the gradient's norm of each unit (output channel; a
            whole vector) is at most the threshold times that of its weights. Default `"norm"`.
        threshold: number > 0. Default 1.0, which is usual for the norm (Hugging Face's Trainer,
            DeepSpeed); for `"adaptive"` the source takes 0.01.

    Raises:
        PlanError: at construction, if a value is out of range; by `clip`, if there are no gradients (as with
            DeepSpeed, which takes them away), or `"adaptive"` meets shards.

    Source: Pascanu et al. 2013, arXiv:1211.5063 (norm); Brock et al., "High-Performance Large-Scale Image
    Recognition Without Normalization", 2021, arXiv:2102.06171 (adaptive).
    """

    by: By = "norm"
    threshold: float = 1.0

    kind: ClassVar[Kind] = "optimizer"
    source: ClassVar[str] = "Pascanu et al. 2013, arXiv:1211.5063; Brock et al. 2021, arXiv:2102.06171"
    unsafe_with: ClassVar[tuple[str, ...]] = ("deepspeed", "fairscale")

    def __post_init__(self) -> None:
        check_choice(self, "by", get_args(By))
        check_range(self, "threshold", "(0, inf)")

    def clip(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Changes the gradients in place; parameters without one are passed over.

        Returns:
            For `"norm"` the norm before, `()`, over all ranks where the gradients are shards; else None. It is
            on the gradients' device: reading it, by `float()`, waits for the step.
        """
        found = with_gradients(self, parameters)
        if self.by == "norm":
            norm: torch.Tensor = nn.utils.clip_grad_norm_(found, self.threshold)
            return norm.full_tensor() if is_dtensor(norm) else norm
        if self.by == "value":
            nn.utils.clip_grad_value_(found, self.threshold)
            return None
        if any(is_dtensor(p) for p in found):
            raise PlanError(
                "GradientClipping(by='adaptive') needs whole weights, and these are sharded (DTensor): "
                "use by='norm' or by='value', or distribute with ddp."
            )
        for parameter in found:
            _clip_to_weights(parameter, self.threshold)
        return None


@torch.no_grad()
def _clip_to_weights(parameter: torch.Tensor, threshold: float) -> None:
    assert parameter.grad is not None, "clip passes such parameters over"
    largest = _unit_norms(parameter).clamp_min(SMALLEST_WEIGHT) * threshold
    # A gradient of 0 gives infinity, which the clamp makes 1.
    share = (largest / _unit_norms(parameter.grad)).clamp_max(1.0)
    parameter.grad.mul_(share)


def _unit_norms(tensor: torch.Tensor) -> torch.Tensor:
    """2-norms, in float32, over all but the first dimension, kept as 1; over all of a vector or scalar."""
    over = tuple(range(1, tensor.dim())) if tensor.dim() > 1 else None
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norms: torch.Tensor = torch.linalg.vector_norm(tensor, dim=over, keepdim=over is not None, dtype=wide)
    return norms


__all__ = ["GradientClipping"]
