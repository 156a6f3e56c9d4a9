"""Train on several ranks that each hold the full model: torch's DistributedDataParallel."""

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
    @property
    def plain_model(self) -> nn.Module:
        return cast(nn.Module, self.model.module)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """DDP decides in the *forward* whether the backward communicates: `no_sync` around the backward alone would do
        nothing."""
        last, wrapper = self._microbatches + 1 == self.accumulate, cast(Any, self.model)
        with nullcontext() if last else wrapper.no_sync(), super().forward_context():
            yield


@dataclass(frozen=True)
class ReplicatedStrategy:
    """Base of the strategies that keep the full model on every rank. A subclass defines how to `_wrap` it.

    They run inside `strategies.launch`, under torchrun, or in the user's own process group. Without one there is a
    single rank, and nothing to wrap.
    """

    device: str | None = None

    name = ""
    summary = ""

    def check(self, devices: int) -> None:
        """Raise `StrategyError` if `devices` ranks cannot train here."""
        check_ranks(self.name, self.device, devices)

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Move `model` to this rank's device, build the optimizer, and wrap; see `base.Strategy.prepare`.

        Every rank starts with rank 0's weights and buffers.

        Raises:
            StrategyError: for an invalid argument, an unavailable device, or a SyncBatchNorm on the CPU.
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
class DDP(ReplicatedStrategy):
    """Each rank holds the full model and trains on its shard of the batch; gradients are averaged.

    Args:
        device: `"cpu"` (gloo) or `"cuda"` (NCCL, see `devices.rank_device`). Default None: CUDA if available, else the
            CPU.
        find_unused_parameters: search in every step for parameters without a gradient, which occur in models that
            freeze or alternate layers. Default False, because the search takes time.

    Example::

        >>> pipeline = pipeline.distribute("ddp", devices=4, find_unused_parameters=True)
    """

    find_unused_parameters: bool = False

    name = "ddp"
    summary = "the full model on every device, gradients averaged (DistributedDataParallel)"

    def _wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> RanksEngine:
        return DDPEngine(self._data_parallel(model, device), optimizer, device, options)

    def _data_parallel(self, model: nn.Module, device: torch.device) -> nn.Module:
        return DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            # Gradients live in the communication buckets instead of separately: 4 bytes per parameter less.
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
            **_buffers_stay_local(model),
        )


def _buffers_stay_local(model: nn.Module) -> dict[str, Any]:
    """Return the option that keeps DDP from overwriting buffers with rank 0's before each forward: `sync_buffers` pools
    them."""
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        return {"forward_sync_buffers": False}
    # Older versions of torch have one option for both, which also skips the broadcast at the start.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    return {"broadcast_buffers": False}
