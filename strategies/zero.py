"""Training on several ranks that divide the optimizer's state: torch's ZeroRedundancyOptimizer over DDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from .common.zero_redundancy import OwnedEngine, copy_groups, keep_part
from .ddp import DDP
from .engine import RanksEngine
from .options import Options


@dataclass(frozen=True)
class ZeroRedundancy(DDP):
    """`DDP`, but each rank keeps the optimizer's state of its share of the parameters, and steps these.

    With AdamW in fp32 a rank keeps 8 + 8/N instead of 16 bytes per parameter (ZeRO's first stage). Whole
    parameters are shared out, the largest first: a model with one huge parameter divides badly. See `DDP` for
    the options, and `owned` for what an optimizer must not do.
    """

    name = "zero_redundancy"
    summary = "like ddp, but the optimizer's state is divided among the devices (ZeroRedundancyOptimizer)"

    def _wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> RanksEngine:
        wrapper = self._data_parallel(model, device)
        divide: Any = ZeroRedundancyOptimizer  # which says that it wants a class, and calls it
        divided = divide(copy_groups(optimizer), keep_part(optimizer))
        return OwnedEngine(wrapper, divided, device, options)
