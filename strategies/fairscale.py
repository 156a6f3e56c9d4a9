"""FairScale's strategies: OSS shards the optimizer's state, ShardedDDP the gradients as well."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..common.errors import StrategyError, require
from .common.sharding import begin_like_rank_0, give_channels_last_inputs, make_contiguous
from .ddp import DDP, OwnedEngine, ReplicatedStrategy, copy_groups, keep_part, refuse_dtypes
from .engine import LocalEngine, RanksEngine
from .options import Options

EXTRA = "fairscale"


class ShardedDDPEngine(OwnedEngine):
    """A model whose gradients are reduced to their owners: after the last `backward` of a step, a rank has None for the
    others. Before that, with `accumulate` above 1, it has its own gradients in full."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with LocalEngine.forward_context(self):
            yield

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        if last_microbatch:  # ShardedDDP checks here, and not in the forward as DDP does
            super().backward(loss, last_microbatch)
            return
        wrapper: Any = self.model
        try:
            with wrapper.no_sync():
                super().backward(loss, last_microbatch)
        finally:  # after an exception no_sync would stay active, and nothing would be reduced
            wrapper._should_accumulate_grads = False

    @torch.no_grad()
    def gradients(self) -> dict[str, torch.Tensor]:
        own, named = super().gradients(), dict(self.plain_model.named_parameters())
        owners = self._sum(torch.tensor([float(name in own) for name in named], device=self.device)).tolist()
        trained = [name for name, number in zip(named, owners, strict=True) if number]
        return {name: self._sum(own.get(name, torch.zeros_like(named[name]))) for name in trained}

    def _clip(self, clip_norm: float) -> torch.Tensor:
        # Not OSS.clip_grad_norm: it remembers from its first call which parameters have a gradient.
        norm = nn.utils.get_total_norm([p.grad for p in self._own if p.grad is not None]).to(self.device)
        total = self._sum(norm.square()).sqrt()
        nn.utils.clip_grads_with_norm_(self._own, clip_norm, total)
        return total


@dataclass(frozen=True)
class FairScaleOSS(DDP):
    """`DDP` with FairScale's OSS, which shards the optimizer's state as `zero_redundancy` does.

    With AdamW in fp32 a rank holds 8 + 8/N instead of 16 bytes per parameter. OSS concatenates a rank's parameters into
    one message after each step: they must have one dtype, and are made contiguous. If the model's weights are
    channels-last, the images are made channels-last instead. Entire parameters are assigned to ranks, in order. Needs
    the extra `fairscale`. See `DDP` for the options, and `ZeroRedundancy` for the limits of the optimizer.

    Example::

        >>> pipeline = pipeline.distribute("fairscale_oss", devices=4)
    """

    name = "fairscale_oss"
    summary = "like ddp, but the optimizer's state is sharded across the devices (FairScale's OSS)"
    extra = EXTRA

    def check(self, devices: int) -> None:
        """Raise `StrategyError` if `devices` ranks cannot train here, `MissingExtra` if FairScale is missing."""
        _require("fairscale.optim.oss", self.name)
        super().check(devices)

    def _wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> RanksEngine:
        divided = _divide(self.name, model, optimizer)
        return OwnedEngine(self._data_parallel(model, device), divided, device, options)


@dataclass(frozen=True)
class FairScaleShardedDDP(ReplicatedStrategy):
    """FairScale's ShardedDDP over OSS: the optimizer's state and the gradients are sharded (ZeRO's second stage).

    With AdamW in fp32 a rank holds 4 + 12/N instead of 16 bytes per parameter, and with `accumulate` above 1 another 4
    before the last microbatch. Gradients are sent to their owners one by one: buckets would keep them all, and lose
    them when they are zeroed. A parameter that no rank uses in a step is fine; one that only some ranks use blocks them
    all. Needs the extra `fairscale`. The requirements of `FairScaleOSS` on parameters apply.

    Args:
        device: as for `DDP`.

    Example::

        >>> pipeline = pipeline.distribute("fairscale_sharded_ddp", devices=4)
    """

    name = "fairscale_sharded_ddp"
    summary = "like fairscale_oss, but the gradients are sharded too (FairScale's ShardedDDP)"
    extra = EXTRA

    def check(self, devices: int) -> None:
        """Raise `StrategyError` if `devices` ranks cannot train here, `MissingExtra` if FairScale is missing."""
        _require("fairscale.nn.data_parallel", self.name)
        super().check(devices)

    def _wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> RanksEngine:
        begin_like_rank_0(model.modules(), device)
        divided = _divide(self.name, model, optimizer)
        backend = _require("fairscale.nn.data_parallel", self.name)
        with _logging_kept():
            wrapper = backend.ShardedDataParallel(
                model,
                divided,
                broadcast_buffers=False,  # BatchNorm's statistics stay local until `sync_buffers`
                sync_models_at_startup=False,
                reduce_buffer_size=0,
                auto_refresh_trainable=False,  # its detection of changes warns through the root logger
            )
        return ShardedDDPEngine(wrapper, divided, device, options)


def _require(module: str, strategy: str) -> ModuleType:
    return require(module, EXTRA, f"train with the strategy {strategy!r}")


def _divide(strategy: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an OSS around `optimizer`, before the model is wrapped: it moves the parameters into buffers."""
    refuse_dtypes(strategy, model)
    if make_contiguous(model):
        give_channels_last_inputs(model)
    divide: Any = _require("fairscale.optim.oss", strategy).OSS
    with _logging_kept():
        divided: torch.optim.Optimizer = divide(copy_groups(optimizer), keep_part(optimizer))
    return divided


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Undo the root handler that FairScale's `logging.info` installs if there is none."""
    before = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = before


@dataclass(frozen=True)
class FairScaleFSDP(ReplicatedStrategy):
    """FairScale's FullyShardedDataParallel, known by name only: it raises an error with the reason.

    It needs CUDA streams, and is the predecessor of what `fsdp` (FSDP2) does on CPUs and GPUs.
    """

    name = "fairscale_fsdp"
    summary = "FairScale's predecessor of fsdp: GPU only, and untested"
    extra = EXTRA

    def check(self, devices: int) -> None:  # noqa: ARG002
        """Raise `StrategyError`: it is not supported yet."""
        reason = "it runs on CUDA GPUs only, and there is none here"
        if torch.cuda.is_available():
            reason = "it has not been tested on GPUs yet"
        raise StrategyError(f"strategy {self.name!r}: {reason}. Use 'fsdp', which shards the same.")
