"""Choose a strategy by the size of the model, the devices, and their free memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Unpack

import torch
import torch.distributed as dist
from torch import nn

from ..common import machine
from .base import Engine, OptimizerFactory
from .common.memory import ADAMW_BYTES
from .common.placement import check_ranks, enter
from .devices import pick_device
from .options import PrepareOptions
from .registry import get

# Fraction of the free memory available to parameters, gradients and optimizer. The rest is for activations, batches
# and what libraries reserve, which depend on the batch and are not measured.
COMFORTABLE = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Auto:
    """Choose `single`, `ddp`, `fsdp` or `fsdp_cpu_offload` in `prepare`, when the model is known, and report why.

    One device uses `single`. Several use `ddp` if AdamW's 16 bytes per parameter fit comfortably into the free memory
    of each, else `fsdp` if a shard of them does, else `fsdp_cpu_offload`. Activations are not measured: a model whose
    activations fill the device runs out of memory with any of them.

    The reason is the engine's `note`, which `fit` prints and stores in the history. It is also logged
    (`drivetrain.strategies.auto`, level INFO), and `choose` returns it in advance.

    Args:
        device: `"cpu"` or `"cuda"`. Default None: CUDA if available, else the CPU.

    Example::

        >>> pipeline = pipeline.distribute("auto", devices=4)
    """

    device: str | None = None

    name = "auto"
    summary = "chooses single, ddp, fsdp or fsdp_cpu_offload by the model's size, the devices and their memory"

    def check(self, devices: int) -> None:
        """Raise `StrategyError` if `devices` ranks cannot train here."""
        check_ranks(self.name, self.device, devices)

    def choose(self, model: nn.Module, devices: int) -> tuple[str, str]:
        """Return the name of a strategy for `model` on `devices` ranks, and the reason, in one line.

        Uses this process's free memory, `prepare` the least of any rank's. Raises `StrategyError` as `check` does.
        """
        self.check(devices)
        return self._choose(model, devices, free_bytes(pick_device(self.device), devices))

    def prepare(self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]) -> Engine:
        """Prepare `model` as the strategy that `choose` selects does, the same on every rank."""
        device = enter(self, model)
        devices = dist.get_world_size() if dist.is_initialized() else 1
        free = torch.tensor(free_bytes(device, devices), dtype=torch.float64, device=device)
        if devices > 1:
            dist.all_reduce(free, op=dist.ReduceOp.MIN)
        name, why = self._choose(model, devices, int(free))
        engine = get(name, device=self.device).prepare(model, optimizer_factory, **given)
        engine.note = f"The strategy 'auto' chose {name!r}: {why}."
        _log.info(engine.note)
        return engine

    def _choose(self, model: nn.Module, devices: int, free: int) -> tuple[str, str]:
        count = sum(parameter.numel() for parameter in model.parameters())
        need, room = ADAMW_BYTES * count, COMFORTABLE * free
        size = f"{count / 1e6:.1f} M parameters need {_gib(need)} with AdamW"
        memory = f"{_gib(free)} are free for each of {devices} device(s), of which {_gib(room)} may be used"
        if devices == 1:
            return "single", f"there is one device; {size}, and {memory}"
        if need <= room:
            return "ddp", f"{size}; {memory}: each can hold all"
        if need / devices <= room:
            return "fsdp", f"{size}; {memory}: each can hold its shard of {_gib(need / devices)}, but not all"
        return "fsdp_cpu_offload", f"{size}; {memory}: not even a shard of {_gib(need / devices)} fits"


def free_bytes(device: torch.device, devices: int) -> int:
    cuda = device.type == "cuda"
    return int(torch.cuda.mem_get_info(device)[0]) if cuda else machine.rank_free_memory(devices)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
