"""Train on one device: the baseline that every other strategy must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch.distributed as dist
from torch import nn

from ..common.errors import StrategyError
from .base import OptimizerFactory
from .common.placement import build_optimizer, put_on
from .devices import pick_device
from .engine import LocalEngine
from .launching.group import in_group
from .options import Options, PrepareOptions


@dataclass(frozen=True)
class Single:
    """One device, no process group.

    Args:
        device: `"cpu"`, `"cuda"` or `"cuda:1"`. Default None: CUDA if available, else the CPU.

    Example::

        >>> engine = Single("cpu").prepare(model, lambda params: torch.optim.SGD(params, lr=0.1), accumulate=2)
    """

    device: str | None = None

    name = "single"
    summary = "one device, CUDA if available, else the CPU"

    def check(self, devices: int) -> None:
        """Raise `StrategyError` unless `devices` is 1 and the device is available."""
        if devices != 1:
            raise StrategyError(f"strategy 'single' trains on 1 device, not {devices}. Use 'ddp' for more.")
        pick_device(self.device)

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Move `model` to the device and build the optimizer; see `base.Strategy.prepare`.

        Raises:
            StrategyError: for an invalid argument, or inside a process group of several ranks, where each would train a
                separate model.
        """
        options = Options.of(given)
        if in_group() and dist.get_world_size() > 1:
            raise StrategyError(
                f"strategy 'single' was prepared on {dist.get_world_size()} ranks, and each would train a separate "
                f"model. Use 'ddp', or devices=1."
            )
        device = pick_device(self.device)
        model = put_on(model, device, options)
        return LocalEngine(model, build_optimizer(model, optimizer_factory), device, options)
