"""Stage three: how a model is trained on one or more devices.

    engine = strategies.get("ddp").prepare(model, optimizer_factory)    # inside each rank
    results = strategies.launch(train, config, devices=2)               # starts the ranks
    print(strategies.available())

A new strategy is one file and one line in `registry.STRATEGIES`. Names are imported at first use:
importing this package costs nothing, which the ranks that `launch` starts rely on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "DDP": "ddp",
    "DeepSpeed": "deepspeed",
    "Engine": "base",
    "FSDP": "fsdp",
    "FSDPCPUOffload": "fsdp",
    "FSDPGradOp": "fsdp",
    "HSDP": "fsdp",
    "OptimizerFactory": "base",
    "OptimizerState": "optimizer_state",
    "Options": "options",
    "Precision": "options",
    "PrepareOptions": "options",
    "Single": "single",
    "Strategy": "base",
    "StrategyRow": "registry",
    "available": "registry",
    "get": "registry",
    "launch": "launcher",
}

__all__ = [
    "DDP",
    "FSDP",
    "HSDP",
    "DeepSpeed",
    "Engine",
    "FSDPCPUOffload",
    "FSDPGradOp",
    "OptimizerFactory",
    "OptimizerState",
    "Options",
    "Precision",
    "PrepareOptions",
    "Single",
    "Strategy",
    "StrategyRow",
    "available",
    "get",
    "launch",
]

if TYPE_CHECKING:
    from .base import Engine, OptimizerFactory, Strategy
    from .ddp import DDP
    from .deepspeed import DeepSpeed
    from .fsdp import FSDP, HSDP, FSDPCPUOffload, FSDPGradOp
    from .launcher import launch
    from .optimizer_state import OptimizerState
    from .options import Options, Precision, PrepareOptions
    from .registry import StrategyRow, available, get
    from .single import Single


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
