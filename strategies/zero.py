"""Train on several ranks with sharded optimizer state: torch's ZeroRedundancyOptimizer over DDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from .common.zero_redundancy import OwnedEngine, copy_groups, keep_part, refuse_dtypes
from .ddp import DDP
from .engine import RanksEngine
from .options import Options


@dataclass(frozen=True)
class ZeroRedundancy(DDP):
    """`DDP`, but each rank holds the optimizer's state of the parameters it owns, and steps only these.

    With AdamW in fp32 a rank holds 8 + 8/N instead of 16 bytes per parameter (ZeRO's first stage). Entire parameters
    are assigned to ranks, largest first: a model with one huge parameter is balanced badly. See `DDP` for the options,
    and `common.zero_redundancy` for the limits of the optimizer.

    Example::

        >>> pipeline = pipeline.distribute("zero_redundancy", devices=4)
    """

    name = "zero_redundancy"
    summary = "like ddp, but the optimizer's state is sharded across the devices (ZeroRedundancyOptimizer)"

    def _wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> RanksEngine:
        refuse_dtypes(self.name, model)
        wrapper = self._data_parallel(model, device)
        divide: Any = ZeroRedundancyOptimizer  # its signature expects a class, which it only calls
        divided = divide(copy_groups(optimizer), keep_part(optimizer))
        return OwnedEngine(wrapper, divided, device, options)
