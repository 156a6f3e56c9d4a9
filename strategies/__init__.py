"""Stage three: train a model on one or more devices.

    engine = strategies.get("ddp").prepare(model, optimizer_factory)    # inside each rank
    results = strategies.launch(train, config, devices=2)               # starts the ranks
    print(strategies.available())

A new strategy is one file and one line in `registry.STRATEGIES`; third-party strategies use `register` or an entry
point. Names are imported at first use: importing this package is cheap, which the ranks that `launch` starts rely on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy import exports

if TYPE_CHECKING:
    from .auto import Auto as Auto
    from .base import Engine as Engine
    from .base import OptimizerFactory as OptimizerFactory
    from .base import Strategy as Strategy
    from .common.blocks import ModuleFilter as ModuleFilter
    from .common.optimizer_state import OptimizerState as OptimizerState
    from .ddp import DDP as DDP
    from .ddp import ZeroRedundancy as ZeroRedundancy
    from .deepspeed.strategy import DeepSpeed as DeepSpeed
    from .fairscale import FairScaleFSDP as FairScaleFSDP
    from .fairscale import FairScaleOSS as FairScaleOSS
    from .fairscale import FairScaleShardedDDP as FairScaleShardedDDP
    from .fsdp import FSDP as FSDP
    from .fsdp import HSDP as HSDP
    from .fsdp import FSDPCPUOffload as FSDPCPUOffload
    from .fsdp import FSDPGradOp as FSDPGradOp
    from .launching.launcher import launch as launch
    from .options import Options as Options
    from .options import Precision as Precision
    from .options import PrepareOptions as PrepareOptions
    from .registry import StrategyRow as StrategyRow
    from .registry import available as available
    from .registry import get as get
    from .registry import register as register
    from .single import DP as DP
    from .single import Single as Single

__getattr__, __dir__, __all__ = exports(__name__, __file__)
