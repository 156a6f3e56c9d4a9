"""Stage three: how a model is trained on one or more devices.

    engine = strategies.get("ddp").prepare(model, optimizer_factory)    # inside each rank
    results = strategies.launch(train, config, devices=2)               # starts the ranks
    print(strategies.available())

A new strategy is one file and one line in `registry.STRATEGIES`; those of others come by `register` or an entry
point. Names are imported at first use:
importing this package costs nothing, which the ranks that `launch` starts rely on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Auto": "auto",
    "DDP": "ddp",
    "DP": "dp",
    "DeepSpeed": "deepspeed",
    "Engine": "base",
    "FSDP": "fsdp",
    "FairScaleFSDP": "fairscale",
    "FairScaleOSS": "fairscale",
    "FairScaleShardedDDP": "fairscale",
    "FSDPCPUOffload": "fsdp",
    "FSDPGradOp": "fsdp",
    "HSDP": "fsdp",
    "OptimizerFactory": "base",
    "OptimizerState": "optimizer_state",
    "Options": "options",
    "Policy": "policy",
    "Precision": "options",
    "PrepareOptions": "options",
    "Single": "single",
    "Strategy": "base",
    "StrategyRow": "registry",
    "ZeroRedundancy": "zero",
    "available": "registry",
    "get": "registry",
    "launch": "launcher",
    "register": "registry",
}

__all__ = [
    "DDP",
    "DP",
    "FSDP",
    "HSDP",
    "Auto",
    "DeepSpeed",
    "Engine",
    "FSDPCPUOffload",
    "FSDPGradOp",
    "FairScaleFSDP",
    "FairScaleOSS",
    "FairScaleShardedDDP",
    "OptimizerFactory",
    "OptimizerState",
    "Options",
    "Policy",
    "Precision",
    "PrepareOptions",
    "Single",
    "Strategy",
    "StrategyRow",
    "ZeroRedundancy",
    "available",
    "get",
    "launch",
    "register",
]

if TYPE_CHECKING:
    from .auto import Auto
    from .base import Engine, OptimizerFactory, Strategy
    from .ddp import DDP
    from .deepspeed.strategy import DeepSpeed
    from .dp import DP
    from .fairscale import FairScaleFSDP, FairScaleOSS, FairScaleShardedDDP
    from .fsdp import FSDP, HSDP, FSDPCPUOffload, FSDPGradOp
    from .launch.launcher import launch
    from .common.optimizer_state import OptimizerState
    from .options import Options, Precision, PrepareOptions
    from .common.module_filter import Policy
    from .registry import StrategyRow, available, get, register
    from .single import Single
    from .zero import ZeroRedundancy


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
