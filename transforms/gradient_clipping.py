"""GradientClipping: bound gradients by norm, by value, or relative to the weights' norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..common.errors import PlanError
from ..common.rows import is_dtensor
from .base import AboveZero, Session, Transform
from .common.moments import session_at
from .common.tensors import with_gradients

By = Literal["norm", "value", "adaptive"]
SMALLEST_WEIGHT = 1e-3
"""Weights with a smaller norm count as this large; otherwise weights that start at 0 could never move. The
paper's epsilon. Composer has none, and its biases that start at 0 stay there."""


@dataclass(frozen=True)
class GradientClipping(Transform):
    """Bound the gradients between the backward pass and the optimizer step.

    DeepSpeed removes the gradients, and FairScale's ShardedDDP keeps each on one rank only, where the norm of the rest
    would silently differ. Use the strategies' own clipping there.

    Attributes:
        by: `"norm"` limits the 2-norm of all gradients together to the threshold; `"value"` clamps each element to ±
            threshold, of complex ones both parts; `"adaptive"` limits the gradient norm of each unit (an output
            channel, or a full vector) to the threshold times the norm of its weights, which must not be sharded.
            Default `"norm"`.
        threshold: number > 0. Default 1.0, as in Hugging Face's Trainer; the paper uses 0.01 for `"adaptive"`.

    Source: Pascanu et al. 2013, arXiv:1211.5063 (norm); Brock et al., "High-Performance Large-Scale Image Recognition
    Without Normalization", 2021, arXiv:2102.06171 (adaptive).

    Example::

        >>> model(images).sum().backward()
        >>> norm = GradientClipping("norm", threshold=1.0).clip(model.parameters())
    """

    by: By = "norm"
    threshold: AboveZero = 1.0

    kind = "optimizer"
    source = "Pascanu et al. 2013, arXiv:1211.5063; Brock et al. 2021, arXiv:2102.06171"
    unsafe_with = ("deepspeed", "fairscale")
    depends_on_length = False
    clips_gradients = True

    @property
    def needs_whole_weights(self) -> str:
        return "by='norm' or by='value'" if self.by == "adaptive" else ""

    def session(self, model: nn.Module) -> Session:
        return session_at(before_step=lambda _: self.clip(model.parameters()))

    def clip(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """Clip the gradients in place; parameters without one are skipped. Raises `PlanError` if none has one.

        For `"norm"`, return the norm before clipping, `()`, over all ranks if the gradients are sharded. It stays on
        the gradients' device: reading it with `float()` synchronizes.
        """
        clipped = with_gradients(self, parameters)
        if self.by == "norm":
            norm: Tensor = nn.utils.clip_grad_norm_(clipped, self.threshold)
            return norm.full_tensor() if is_dtensor(norm) else norm
        if self.by == "value":
            if real := [p for p in clipped if not p.is_complex()]:
                nn.utils.clip_grad_value_(real, self.threshold)
            for parameter in clipped:
                if parameter.is_complex():
                    _clip_parts(parameter, self.threshold)
            return None
        if any(is_dtensor(p) for p in clipped):
            raise PlanError(
                "GradientClipping(by='adaptive') needs full weights, but these are sharded (DTensor). Set by='norm' "
                "or by='value', or use the strategy ddp."
            )
        for parameter in clipped:
            _clip_to_weights(parameter, self.threshold)
        return None


@torch.no_grad()
def _clip_parts(parameter: Tensor, threshold: float) -> None:
    """Clamp real and imaginary parts, which are numbers of their own, as in torch's optimizers."""
    assert parameter.grad is not None, "clip skips parameters without a gradient"
    for part in (parameter.grad.real, parameter.grad.imag):
        part.clamp_(-threshold, threshold)


@torch.no_grad()
def _clip_to_weights(parameter: Tensor, threshold: float) -> None:
    assert parameter.grad is not None, "clip skips parameters without a gradient"
    largest = _unit_norms(parameter).clamp_min(SMALLEST_WEIGHT) * threshold
    # A gradient of 0 gives infinity, which is clamped to 1.
    share = (largest / _unit_norms(parameter.grad)).clamp_max(1.0)
    parameter.grad.mul_(share)


def _unit_norms(tensor: Tensor) -> Tensor:
    """Return 2-norms in float32 over all but the first dimension, kept as 1; over all of a vector or scalar."""
    over = tuple(range(1, tensor.dim())) if tensor.dim() > 1 else None
    wide = torch.promote_types(tensor.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=over, keepdim=over is not None, dtype=wide)
    return norms
