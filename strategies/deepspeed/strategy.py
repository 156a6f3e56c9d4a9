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

from ...errors import StrategyError, require
from ..base import OptimizerFactory
from ..common.blocks import find_blocks
from ..common.materialise import materialise, refuse_without_reset
from ..common.placement import build_optimizer, check_ranks, compile_in_place, enter, put_on
from ..common.recompute import recompute_activations
from ..common.sharding import (
    begin_like_rank_0,
    give_channels_last_inputs,
    make_contiguous,
    refuse_unshardable,
)
from ..engine import LocalEngine
from ..options import Options, PrepareOptions
from .adam import faster
from .backend import reason_without_aio, working
from .config import Zero, choose_zero, make_config, read_config, takes_cpu_adam
from .engine import DeepSpeedEngine

SUMMARIES = {
    1: "optimizer state divided among the devices (DeepSpeed ZeRO 1)",
    2: "optimizer state and gradients divided among the devices (DeepSpeed ZeRO 2)",
    3: "optimizer state, gradients and parameters divided among the devices (DeepSpeed ZeRO 3)",
}


@dataclass(frozen=True)
class DeepSpeed:
    """DeepSpeed's ZeRO: each rank keeps its part of what the stage divides.

    With AdamW in fp32 over N ranks, a rank keeps after the step 4 + 12/N bytes per parameter with stages 1 and 2,
    20/N with stage 3 (DeepSpeed steps a copy of the weights), and gradients in the backward: 4/N. Stage 3 keeps
    parameters below `stage3_param_persistence_threshold` (100,000 elements) whole, beside their part.

    The optimizer is the factory's; it must treat each element by itself, as SGD and Adam do. Every parameter that it
    has must take part in every step: DeepSpeed steps one without a gradient by zero, weight decay included, and stages
    1 and 2 mix up gradients that come in another order on another rank, as where a model chooses its layers by the
    data. Weights stay fp32; precision "bf16" is autocast around the forward, and gradients are reduced in fp32.
    Channels-last weights become contiguous, and images channels-last instead, as in `FSDP`.

    Where the optimizer is offloaded to the CPU, DeepSpeed's compiled DeepSpeedCPUAdam takes the place of torch's Adam
    and AdamW (see `deepspeed_adam`): it computes the same up to fp32's rounding. Its first use on a machine compiles
    it, for five minutes at most. If that fails, torch's stays, and the engine's `note` gives the reason. The key
    `zero_force_ds_cpu_optimizer: false` in `config` keeps torch's.

    A model on the meta device gets its values as in `FSDP`, with stage 3 block by block.

    Precision "fp16", and `compile` with stage 3, are errors.

    Alone in a process, without a process group, there is nothing to divide, and it trains like `single`; with
    `offload` or `config`, which would do nothing, that is an error.

    Args:
        device: `"cpu"` (gloo) or `"cuda"` (NCCL, see `devices.rank_device`); None takes CUDA if there is any, else
            the CPU. One kind of device for all engines of a process.
        stage: 1, 2 or 3; None takes that of `config`, else 2, as Lightning does.
        offload: `"cpu"`: the optimizer and its state, with stage 3 also the parameters, are on the CPU; `"nvme"`
            (stage 3): on a disk, which no test has run. None takes that of `config`, else nothing is offloaded.
        nvme_path: for `"nvme"`, a folder on that disk.
        config: a DeepSpeed configuration, as a dict or the path of a JSON file. What Drivetrain decides (optimizer,
            schedule, batch size, precision, clipping, accumulation) must not be in it, or be `"auto"`, or the same.

    Raises:
        StrategyError: at construction, for an option that means nothing or contradicts `config`.
    """

    device: str | None = None
    stage: int | None = None
    offload: str | None = None
    nvme_path: str | None = None
    config: str | Path | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._zero()

    @property
    def name(self) -> str:
        """Lightning's name: `deepspeed_stage_2`, `deepspeed_stage_3_offload`, `deepspeed_stage_3_offload_nvme`."""
        zero = self._zero()
        kept = {None: "", "cpu": "_offload", "nvme": "_offload_nvme"}[zero.offload]
        return f"deepspeed_stage_{zero.stage}{kept}"

    @property
    def summary(self) -> str:
        """One line for `strategies.available()`."""
        zero = self._zero()
        return SUMMARIES[zero.stage] + (
            "" if zero.offload is None else f", kept on the {zero.offload.upper()}"
        )

    def _zero(self) -> Zero:
        return choose_zero(self.stage, self.offload, self.nvme_path, read_config(self.config))

    def check(self, devices: int) -> None:
        """Checks that DeepSpeed is here, without importing it unless NVMe is asked for.

        Raises:
            MissingExtra: if it is not installed.
            StrategyError: if `devices` ranks cannot train here.
        """
        check_ranks(self.name, self.device, devices)
        if importlib.util.find_spec("deepspeed") is None:
            require("deepspeed", "deepspeed", "divide a training with ZeRO")  # says how to install it
        zero = self._zero()
        if zero.offload != "nvme":
            return
        if reason := reason_without_aio():
            raise StrategyError(f"strategy {self.name!r}: {reason}, or use 'deepspeed_stage_3_offload'.")
        if zero.nvme_path is None or not Path(zero.nvme_path).is_dir():
            raise StrategyError(
                f"strategy {self.name!r}: nvme_path={zero.nvme_path!r} is no folder; give one on the disk to use."
            )

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Builds the optimizer, then divides; see `base.Strategy.prepare`.

        Rank 0's weights and buffers become everyone's.

        Raises:
            MissingExtra: if DeepSpeed is not installed.
            StrategyError: for an argument that means nothing or contradicts `config`, a device that is not here,
                or a model that cannot be divided: wrapped or divided already, with a parameter of no dimension or no
                shape yet, a module on the meta device that cannot be reset, a SyncBatchNorm on the CPU.
        """
        options = Options.of(given)
        zero = self._zero()
        _refuse_options(self.name, options, zero)
        config = make_config(zero, options, read_config(self.config), self.name)
        device = enter(self, model)
        _refuse_divided(self.name, model)
        refuse_unshardable(self.name, model)
        refuse_without_reset(self.name, model)
        if not dist.is_initialized():
            self._check_alone(zero)
            materialise(model, device)
            model = put_on(model, device, options)
            return LocalEngine(model, build_optimizer(model, optimizer_factory), device, options)
        if make_contiguous(model):
            give_channels_last_inputs(model)
        # Before anything is divided: blocks are found, and a factory may look, by shapes, which stage 3 empties.
        recompute_activations(model, options.activation_checkpointing)
        before = dict(model.named_parameters())
        optimizer = build_optimizer(model, optimizer_factory)
        with working(device) as deepspeed:
            _place(
                model, device, deepspeed.zero.Init(config_dict_or_path=config) if zero.stage == 3 else None
            )
            _exchange(optimizer, before, dict(model.named_parameters()))
            compile_in_place(model, options.compile)
            note = ""
            if takes_cpu_adam(config, read_config(self.config)):
                optimizer, note = faster(optimizer, deepspeed, device)
            groups = [list(group["params"]) for group in optimizer.param_groups]
            wrapper, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )
        engine = DeepSpeedEngine(wrapper, deepspeed, groups, device, options, zero.stage)
        engine.note = note
        return engine

    def _check_alone(self, zero: Zero) -> None:
        if zero.offload is not None or self.config is not None:
            raise StrategyError(
                f"strategy {self.name!r}: there is no process group, without which DeepSpeed does nothing; start this "
                f"with torchrun --nproc-per-node=1 or strategies.launch(…, devices=1), or use 'single'."
            )


def _refuse_options(strategy: str, options: Options, zero: Zero) -> None:
    """Raises StrategyError for an option that DeepSpeed cannot do exactly."""
    if options.precision == "fp16":
        raise StrategyError(
            f"strategy {strategy!r}: precision='fp16' would have two loss scales, DeepSpeed's and torch's; use 'bf16'."
        )
    if options.compile and zero.stage == 3:
        raise StrategyError(
            f"strategy {strategy!r}: compile={options.compile!r} cannot see through the hooks by which stage 3 gathers "
            f"parameters; leave it out, or use 'deepspeed_stage_2' or 'fsdp'."
        )


def _refuse_divided(strategy: str, model: nn.Module) -> None:
    """Raises StrategyError if DeepSpeed has had a parameter of `model` before."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            raise StrategyError(
                f"strategy {strategy!r}: the parameter {name!r} was divided by DeepSpeed already; give a plain model."
            )


def _place(model: nn.Module, device: torch.device, init: Any) -> None:
    """Moves `model` to the device with rank 0's values; block by block, each divided at once, if `init` is given."""
    done: set[nn.Module] = set()
    for block in (*(find_blocks(model) if init else ()), model):
        materialise(block, device, done)
        own = [module for module in block.modules() if module not in done]
        begin_like_rank_0(own, device)
        for module in own:
            # Not `Module.to`, which would also take the parameters of the blocks inside.
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
            for parameter in module.parameters(recurse=False):
                # Viewed anew, for DeepSpeed fails on the strides that 1 × 1 convolutions keep of channels-last.
                whole = parameter.data if init else parameter.data.to(device)
                parameter.data = whole.flatten().view(parameter.shape)
        if init is not None:
            init._convert_to_zero_parameters(block.parameters())
        done.update(own)


def _exchange(
    optimizer: torch.optim.Optimizer, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]
) -> None:
    """Gives the optimizer the parameters that have taken the place of those on the meta device."""
    now = {parameter: after[name] for name, parameter in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [now.get(parameter, parameter) for parameter in group["params"]]
