"""Training on several ranks with DeepSpeed's ZeRO: stages 1 to 3, with or without offload."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from ..errors import StrategyError
from .base import OptimizerFactory
from .deepspeed_backend import initialize, load
from .deepspeed_config import Zero, choose_zero, make_config, read_config
from .deepspeed_engine import DeepSpeedEngine
from .engine import LocalEngine
from .materialise import materialise, refuse_without_reset
from .options import Options, PrepareOptions
from .sharding import begin_like_rank_0, give_channels_last_inputs, make_contiguous, refuse_unshardable
from .surroundings import build_optimizer, check_ranks, enter

SUMMARIES = {
    1: "the optimizer's state divided among the devices (DeepSpeed ZeRO 1)",
    2: "optimizer state and gradients divided among the devices (DeepSpeed ZeRO 2)",
    3: "optimizer state, gradients and parameters divided among the devices (DeepSpeed ZeRO 3)",
}


@dataclass(frozen=True)
class DeepSpeed:
    """x"""

    device: str | None = None
    stage: int | None = None
    offload: str | None = None
    nvme_path: str | None = None
    config: str | Path | Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        zero = self._zero()
        return f"deepspeed_stage_{zero.stage}" + {None: "", "cpu": "_offload", "nvme": "_offload_nvme"}[zero.offload]

    @property
    def summary(self) -> str:
        zero = self._zero()
        return SUMMARIES[zero.stage] + (f", kept on the {zero.offload}" if zero.offload else "")

    def _zero(self) -> Zero:
        return choose_zero(self.stage, self.offload, self.nvme_path, read_config(self.config), "deepspeed")

    def check(self, devices: int) -> None:
        check_ranks(self.name, self.device, devices)
        if importlib.util.find_spec("deepspeed") is None:
            load()

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        options = Options.of(given)
        zero = self._zero()
        config = make_config(zero, options, read_config(self.config), self.name)
        device = enter(self, model)
        refuse_unshardable(self.name, model)
        refuse_without_reset(self.name, model)
        if not dist.is_initialized():
            materialise(model, device)
            model = model.to(device)
            return LocalEngine(model, build_optimizer(model, optimizer_factory), device, options)
        if make_contiguous(model):
            give_channels_last_inputs(model)
        materialise(model, device)
        model = model.to(device)
        begin_like_rank_0(model.modules(), device)
        optimizer = build_optimizer(model, optimizer_factory)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        wrapper = initialize(model, optimizer, config, device)
        return DeepSpeedEngine(wrapper, groups, device, options, zero.stage)
