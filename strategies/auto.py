"""The strategy that chooses one: by the size of the model, the devices, and the memory they have free."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Unpack

import torch
import torch.distributed as dist
from torch import nn

from .. import machine
from .base import Engine, OptimizerFactory, Strategy
from .common.memory import ADAMW_BYTES
from .common.placement import check_ranks, enter
from .devices import pick_device
from .options import PrepareOptions

COMFORTABLE = 0.5
"""Share of the free memory that parameters, gradients and optimizer may take: the rest is for activations,
batches and what the libraries reserve, which depend on the batch and are not measured."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Auto:
    """Chooses `single`, `ddp`, `fsdp` or `fsdp_cpu_offload` in `prepare`, when the model is there, and says why.

    One device takes `single`. Several take `ddp` if AdamW's 16 bytes per parameter fit comfortably into the free
    memory of each, else `fsdp` if a share of them does, else `fsdp_cpu_offload`. It does not measure
    activations: a model whose activations fill the device runs out of memory under any of them.

    The reason is the engine's `note`, which `fit` prints and keeps in the history; it goes to the log as well
    (`drivetrain.strategies.auto`, level INFO), and `choose` gives it beforehand.

    Args:
        device: `"cpu"` or `"cuda"`; None takes CUDA if there is any, else the CPU.
    """

    device: str | None = None

    name = "auto"
    summary = (
        "chooses single, ddp, fsdp or fsdp_cpu_offload by the model's size, the devices and their memory"
    )

    def check(self, devices: int) -> None:
        """Raises StrategyError if `devices` ranks cannot train here."""
        check_ranks(self.name, self.device, devices)

    def choose(self, model: nn.Module, devices: int) -> tuple[str, str]:
        """The name of a strategy for `model` on `devices` ranks, and why, in one line. Nothing is changed.

        The memory is this process's; `prepare` goes by the rank that has least.

        Raises:
            StrategyError: if so many ranks cannot train here.
        """
        self.check(devices)
        return self._choose(model, devices, free_bytes(pick_device(self.device), devices))

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> Engine:
        """Prepares `model` with the strategy that `choose` names, on every rank the same.

        Raises:
            StrategyError: as that strategy does.
        """
        device = enter(self, model)
        devices = dist.get_world_size() if dist.is_initialized() else 1
        free = torch.tensor(free_bytes(device, devices), dtype=torch.float64, device=device)
        if devices > 1:
            dist.all_reduce(free, op=dist.ReduceOp.MIN)
        name, why = self._choose(model, devices, int(free))
        engine = self._made(name).prepare(model, optimizer_factory, **given)
        engine.note = f"The strategy 'auto' chose {name!r}: {why}."
        _log.info(engine.note)
        return engine

    def _made(self, name: str) -> Strategy:
        from .registry import get

        return get(name, device=self.device)

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
            return "fsdp", f"{size}; {memory}: each can hold its share of {_gib(need / devices)}, but not all"
        return "fsdp_cpu_offload", f"{size}; {memory}: not even a share of {_gib(need / devices)} fits"


def free_bytes(device: torch.device, devices: int) -> int:
    """Memory that a rank may take on `device`: a GPU's free memory, or its share of the machine's or container's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return machine.rank_free_memory(devices)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
