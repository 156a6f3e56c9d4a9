"""The moments of the training loop, and what a session that follows them can see and change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Moment = Literal[
    "fit_start", "iteration_start", "epoch_start", "after_dataloader", "batch_start", "before_train_batch",
    "before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward",
    "after_train_batch", "batch_end", "epoch_end", "fit_end",
]  # fmt: skip
"""The moments, under the names of Composer's events. `before_forward` to `after_backward` come once per microbatch."""


@dataclass
class LoopView:
    """The loop on one rank, at a moment.

    Attributes:
        model: the user's module, without the strategy's wrapper.
        forward: maps images to the outputs of the wrapped model.
        optimizer: the optimizer, built from the model's parameters.
        device: the device of the batches.
        rank, world_size: of this process.
        sharded: whether parameters are sharded.
        precision: `"fp32"`, `"bf16"` or `"fp16"`.
        seed: of the run.
        total_steps, steps_per_epoch: optimizer steps.
        batch_size: images of a batch over all ranks; 0 if unknown.
        loader: the training loader; None outside a pipeline.
        epoch, step, step_in_epoch: finished epochs, completed steps, and those of the current epoch.
        loss_function: the training loss, of outputs and targets.
        batch: `(images, targets)` of this rank: the batch, or within a microbatch the microbatch. Settable.
        outputs: of the model, in float32. Settable.
        loss: the mean over the microbatch, a scalar. Settable.
        microbatch: its number over all ranks; outside of microbatches, the rank.
    """

    model: nn.Module
    forward: Callable[[torch.Tensor], Any]
    optimizer: torch.optim.Optimizer
    device: torch.device
    rank: int
    world_size: int
    sharded: bool
    precision: str
    seed: int
    total_steps: int
    steps_per_epoch: int
    batch_size: int
    loader: Any
    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    loss_function: Callable[..., torch.Tensor] | None = None
    batch: Any = None
    outputs: Any = None
    loss: Any = None
    microbatch: int = 0


__all__ = ["LoopView", "Moment"]
