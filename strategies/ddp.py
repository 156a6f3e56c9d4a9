"""Training on several ranks that each hold the whole model: torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .base import OptimizerFactory
from .common.placement import build_optimizer, check_ranks, enter, put_on
from .engine import LocalEngine, RanksEngine
from .options import Options, PrepareOptions


class DDPEngine(RanksEngine):
    """A model wrapped by DistributedDataParallel; see `base.Engine` for what each method promises."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> None:
        super().__init__(model, optimizer, device, options)
        self._wrapper: Any = model  # has `module` and `no_sync`

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


@dataclass(frozen=True)
class OnEveryRank:
    """What strategies share that keep the whole model on every rank. A subclass says how to `_wrap` it.

    They run inside `strategies.launch`, under torchrun, or in a process group of the user's own; alone in a
    process there is one rank, and nothing to wrap.
    """

    device: str | None = None

    name = ""
    summary = ""

    def check(self, devices: int) -> None:
        """Raises StrategyError if `devices` ranks cannot train here."""
        check_ranks(self.name, self.device, devices)

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Moves `model` to this rank's device, builds the optimizer, wraps; see `base.Strategy.prepare`.

        Rank 0's weights and buffers become everyone's.

        Raises:
            StrategyError: for an argument that means nothing, a device that is not here, or a
                SyncBatchNorm on the CPU.
        """
        options = Options.of(given)
        device = enter(self, model)
        model = put_on(model, device, options)
        optimizer = build_optimizer(model, optimizer_factory)
        if not dist.is_initialized():
            return LocalEngine(model, optimizer, device, options)
        return self._wrap(model, optimizer, device, options)

    def _wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> RanksEngine:
        raise NotImplementedError


@dataclass(frozen=True)
class DDP(OnEveryRank):
    """Each rank holds the whole model and trains on its slice of the batch; gradients are averaged.

    Args:
        device: `"cpu"` (gloo) or `"cuda"` (NCCL, see `devices.rank_device`); None takes CUDA if there
            is any, else the CPU.
        find_unused_parameters: look in every step for parameters that got no gradient, as models whose
            layers freeze or take turns have them. False, because the search costs time.
    """

    find_unused_parameters: bool = False

    name = "ddp"
    summary = "the whole model on every device, gradients averaged (DistributedDataParallel)"

    def _wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> RanksEngine:
        return DDPEngine(self._data_parallel(model, device), optimizer, device, options)

    def _data_parallel(self, model: nn.Module, device: torch.device) -> nn.Module:
        return DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            # Gradients live in the communication buckets, not beside them: 4 bytes per parameter less.
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
            **_buffers_stay_local(model),
        )


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
