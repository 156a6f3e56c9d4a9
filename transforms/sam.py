"""SAM: use the gradient at the worst point nearby, which leads to flat minima."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..common.model_state import buffers_kept
from .base import AboveZero, Loop, Positive, Session, Transform
from .common.moments import session_at
from .common.tensors import locals_of, total_norm, with_gradients


@dataclass(frozen=True)
class SAM(Transform):
    """Step with the gradient taken at weight + rho · gradient / norm of all gradients. In a loop::

        gradients(batch)
        if sam.applies(step):
            restore = sam.perturb(model.parameters())
            model.zero_grad()
            gradients(batch)  # of the same batch, at the perturbed weights
            restore()
        optimizer.step()

    The second pass updates BatchNorm's statistics again, unless it runs inside `buffers_kept(model)`. Gradients are
    those of all ranks if the loop synchronizes the first pass; in Composer each rank perturbs by its own. Not with
    DeepSpeed, which removes the gradients, or FairScale's ShardedDDP, which keeps each on one rank only.

    Attributes:
        rho: distance to the worst point, in the 2-norm of all weights together. Number > 0. Default 0.05, from the
            paper and Composer; Composer's ResNet recipes use 0.5 with `interval` 10.
        interval: perturb every `interval`-th step, at twice the cost. Integer ≥ 1. Default 1, as in Composer.

    Raises:
        PlanError: from `perturb`, if there are no gradients.

    Source: Foret et al., "Sharpness-Aware Minimization", 2021, arXiv:2010.01412.

    Example::

        >>> pipeline = pipeline.transform(SAM(rho=0.05, interval=2))
    """

    rho: AboveZero = 0.05
    interval: Positive = 1

    kind = "optimizer"
    source = "Foret et al. 2021, arXiv:2010.01412"
    unsafe_with = ("deepspeed", "fairscale")
    depends_on_length = False

    def applies(self, step: int) -> bool:
        """Return whether the step after `step` optimizer steps is a perturbed one."""
        return (step + 1) % self.interval == 0

    @torch.no_grad()
    def perturb(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """Move the parameters, in place, to the worst point nearby; return a function that restores them exactly, once.

        Parameters without a gradient are not moved; gradients are not changed. Shards (DTensor) are moved by the norm
        over all ranks. A copy of the parameters is kept until they are restored.
        """
        moved = with_gradients(self, parameters)
        gradients = [p.grad for p in moved if p.grad is not None]
        norm = total_norm(gradients)
        weights, slopes = locals_of(moved), locals_of(gradients)
        before = [(weight, weight.clone()) for weight in weights]
        scale = self.rho / (norm + 1e-12)
        # Not foreach's `alpha`, which would require reading the value from the device first.
        torch._foreach_add_(weights, [slope * scale.to(slope.device) for slope in slopes])

        @torch.no_grad()
        def restore() -> None:
            for weight, value in before:
                weight.copy_(value)
            before.clear()

        return restore

    def session(self, model: nn.Module) -> Session:
        def second_pass(loop: Loop) -> None:
            if not self.applies(loop.step):
                return
            if loop.precision == "fp16":  # an overflow: the step is skipped, and must remain marked for it
                slopes = [p.grad for p in model.parameters() if p.grad is not None]
                if not total_norm(slopes).isfinite():
                    return
            restore = self.perturb(model.parameters())
            loop.engine.zero_grad()
            with buffers_kept(model):  # each image updates BatchNorm's statistics once
                loop.gradients()
            restore()

        return session_at(after_gradients=second_pass)
