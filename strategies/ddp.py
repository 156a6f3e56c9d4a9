"""Training on several ranks that each hold the whole model: torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import StrategyError
from .base import OptimizerFactory, Precision
from .engine import LocalEngine, StepOptions, build_optimizer, pick_device
from .group import join_group, local_rank, under_torchrun


class DDPEngine(LocalEngine):
    """A model wrapped by DistributedDataParallel; see `base.Engine` for what each method promises."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        options: StepOptions,
    ) -> None:
        super().__init__(model, optimizer, device, options)
        self._wrapper = model
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    @property
    def plain_model(self) -> nn.Module:
        """The user's module, inside the wrapper."""
        return cast(nn.Module, self._wrapper.module)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The precision's autocast; before the last microbatch also DDP's `no_sync`.

        DDP decides in the *forward* whether the backward will communicate: `no_sync` around the
        backward alone would do nothing.
        """
        last = self._microbatches + 1 == self.accumulate
        with nullcontext() if last else self._wrapper.no_sync(), super().forward_context():
            yield

    def sync_buffers(self) -> None:
        """Makes floating-point buffers (BatchNorm's statistics) their mean over all ranks.

        Integer buffers (`num_batches_tracked`) count the same steps on each rank and stay.
        """
        buffers = [b for b in self.plain_model.buffers() if b.is_floating_point()]
        for dtype in dict.fromkeys(b.dtype for b in buffers):
            same = [b for b in buffers if b.dtype == dtype]
            # One message instead of two for each BatchNorm layer.
            mean = self.reduce(torch.cat([b.detach().flatten() for b in same]))
            for buffer, values in zip(same, torch.split(mean, [b.numel() for b in same]), strict=True):
                buffer.detach().copy_(values.view_as(buffer))

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value


@dataclass(frozen=True)
class DDP:
    """Each rank holds the whole model and trains on its slice of the batch; gradients are averaged.

    Runs inside `strategies.launch`, under torchrun, or in a process group of the user's own; alone in
    a process it is one rank, and there is nothing to wrap.

    Args:
        device: `"cpu"` (gloo) or `"cuda"` (NCCL, the device is LOCAL_RANK); None takes CUDA if there
            is any, else the CPU.
        find_unused_parameters: look in every step for parameters that got no gradient, as models whose
            layers freeze or take turns have them. False, because the search costs time.
    """

    device: str | None = None
    find_unused_parameters: bool = False

    name = "ddp"
    summary = "the whole model on every device, gradients averaged (DistributedDataParallel)"

    def check(self, devices: int) -> None:
        """Raises StrategyError if `devices` ranks cannot train here."""
        if devices < 1:
            raise StrategyError(f"strategy 'ddp': devices={devices} must be 1 or more.")
        if not dist.is_available():
            raise StrategyError("strategy 'ddp': this torch is built without torch.distributed.")
        if self.device not in (None, "cpu", "cuda"):
            raise StrategyError(
                f"strategy 'ddp': device={self.device!r} is not one for all ranks; use 'cpu' or 'cuda' "
                f"(the index is the rank's), or 'single' for one given device."
            )
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
        pick_device(self.device, on_this_machine - 1)

    def prepare(
        self,
        model: nn.Module,
        optimizer_factory: OptimizerFactory,
        *,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        accumulate: int = 1,
    ) -> LocalEngine:
        """Moves `model` to this rank's device, builds the optimizer, wraps; see `base.Strategy.prepare`.

        Rank 0's weights and buffers become everyone's.

        Raises:
            StrategyError: for an argument that means nothing, a device that is not here, or a
                SyncBatchNorm on the CPU.
        """
        options = StepOptions(precision, clip_norm, accumulate)
        if not dist.is_initialized() and under_torchrun():
            join_group()
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.check(world_size)
        device = pick_device(self.device, local_rank())
        _refuse_sync_batch_norm(model, device)
        model = model.to(device)
        optimizer = build_optimizer(model, optimizer_factory)
        if not dist.is_initialized():
            return LocalEngine(model, optimizer, device, options)
        wrapper = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            # Gradients live in the communication buckets, not beside them: 4 bytes per parameter less.
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
            **_buffers_stay_local(model),
        )
        return DDPEngine(wrapper, optimizer, device, options)


def _buffers_stay_local(model: nn.Module) -> dict[str, Any]:
    """The option that keeps DDP from overwriting buffers with rank 0's before each forward.

    BatchNorm's statistics would be rank 0's by accident; `sync_buffers` takes their mean. At the start
    they are rank 0's, like the weights.
    """
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        return {"forward_sync_buffers": False}
    # Older torch has one option for both, which also leaves out the broadcast at the start.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    return {"broadcast_buffers": False}


def _refuse_sync_batch_norm(model: nn.Module, device: torch.device) -> None:
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise StrategyError(
                f"strategy 'ddp': {name or 'the model'} is a SyncBatchNorm, which works on CUDA only, and "
                f"this rank trains on the CPU; use BatchNorm2d there."
            )
