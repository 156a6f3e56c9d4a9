"""SGD with decoupled weight decay, as in Composer's ResNet recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SGDW(torch.optim.SGD):
    """SGD whose weight decay is not part of the gradient: each step multiplies the weights by
    1 - weight_decay · lr / initial_lr, and then performs SGD's update.

    So `weight_decay` is the fraction that a weight loses per step at the peak learning rate, independently of that peak
    and of the momentum; it follows the schedule. (In SGD it is multiplied by the learning rate and accumulates in the
    momentum: at the peak, lr · weight_decay / (1 - momentum) per step.) Weights without a gradient are not decayed.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, arXiv:1711.05101, algorithm 1;
    the updates equal those of Composer's `DecoupledSGDW`.

    Args:
        params: parameters or parameter groups.
        lr: the peak learning rate, which a schedule scales.
        momentum, dampening, nesterov: as in `torch.optim.SGD`.
        weight_decay: fraction that a weight loses per step at the peak. Default 0.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Its current learning rate is its peak, stored as `initial_lr`."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("initial_lr", self.param_groups[-1]["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one step. `closure`, if given, first computes the loss and its gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            share = group["lr"] / group["initial_lr"] if group["initial_lr"] else 1.0
            if weights and group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["weight_decay"] * share)
            group["weight_decay"] = 0.0  # SGD would add it to the gradient
        try:
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        return loss
