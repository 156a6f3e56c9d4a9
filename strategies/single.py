"""Training on one device: the baseline that every other strategy must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch.distributed as dist
from torch import nn

from ..errors import StrategyError
from .base import OptimizerFactory
from .common.placement import build_optimizer, put_on
from .devices import pick_device
from .engine import LocalEngine
from .options import Options, PrepareOptions


@dataclass(frozen=True)
class Single:
    """One device, no process group.

    Args:
        device: `"cpu"`, `"cuda"` or `"cuda:1"`; None takes CUDA if there is any, else the CPU.
    """

    device: str | None = None

    name = "single"
    summary = "one device, CUDA if there is any, else the CPU"

    def check(self, devices: int) -> None:
        """Raises StrategyError unless `devices` is 1 and the device is here."""
        if devices != 1:
            raise StrategyError(f"strategy 'single' trains on 1 device, not {devices}; use 'ddp' for more.")
        pick_device(self.device)

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Moves `model` to the device and builds the optimizer; see `base.Strategy.prepare`.

        Raises:
            StrategyError: for an argument that means nothing, or inside a process group of several
                ranks, where each would train a model of its own.
        """
        options = Options.of(given)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise StrategyError(
                f"strategy 'single' was prepared on {dist.get_world_size()} ranks, and each would train a "
                f"model of its own; use 'ddp', or devices=1."
            )
        device = pick_device(self.device)
        model = put_on(model, device, options)
        return LocalEngine(model, build_optimizer(model, optimizer_factory), device, options)
