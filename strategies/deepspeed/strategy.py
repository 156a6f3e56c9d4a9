"""Train on several ranks with DeepSpeed's ZeRO: stages 1 to 3, with or without offload."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from ...common.errors import StrategyError, require
from ..base import OptimizerFactory
from ..common import meta, sharding
from ..common.blocks import find_blocks
from ..common.placement import build_optimizer, change_layers, check_ranks, compile_model, enter, put_on
from ..devices import local_rank, pick_device
from ..engine import LocalEngine
from ..options import Options, PrepareOptions
from .config import Zero, choose_zero, make_config, read_config
from .engine import DeepSpeedEngine

EXTRA = "deepspeed"
SUMMARIES = {
    1: "optimizer state sharded across the devices (DeepSpeed ZeRO 1)",
    2: "optimizer state and gradients sharded across the devices (DeepSpeed ZeRO 2)",
    3: "optimizer state, gradients and parameters sharded across the devices (DeepSpeed ZeRO 3)",
}


@dataclass(frozen=True)
class DeepSpeed:
    """DeepSpeed's ZeRO: each rank keeps its shard of what the stage partitions.

    With AdamW in fp32 on N ranks, a rank holds 4 + 12/N bytes per parameter after the step with stages 1 and 2, and
    20/N with stage 3 (DeepSpeed steps a copy of the weights), plus gradients in the backward: 4/N. Stage 3 keeps
    parameters below `stage3_param_persistence_threshold` (100,000 elements) in full, in addition to their shard.

    The optimizer is the factory's; it must treat each element independently, as SGD and Adam do. Each of its parameters
    must take part in every step: DeepSpeed steps one without a gradient with zeros, weight decay included, and stages 1
    and 2 mix up gradients that arrive in a different order on another rank, as with models that choose layers by the
    data. Weights are fp32; precision "bf16" is autocast around the forward, and gradients are reduced in fp32.
    Channels-last weights are made contiguous and images channels-last instead, as in `FSDP`.

    If the optimizer is offloaded to the CPU, torch's Adam and AdamW step with their fused kernel; see `step_fused`. A
    model on the meta device is initialized as in `FSDP`, with stage 3 block by block. Precision "fp16", and `compile`
    with stage 3, are not supported.

    Without a process group it trains like `single`; `offload` and `config`, without effect, then raise an error.

    Args:
        device: `"cpu"` (gloo) or `"cuda"` (NCCL, see `devices.rank_device`). Default None: CUDA if available, else the
            CPU. All engines of a process must use the same kind of device.
        stage: 1, 2 or 3. Default None: that of `config`, else 2, as in Lightning.
        offload: `"cpu"` keeps the optimizer and its state, with stage 3 also the parameters, on the CPU; `"nvme"`
            (stage 3) keeps them on a disk (not tested). Default None: that of `config`, else no offload.
        nvme_path: for `"nvme"`, a folder on that disk.
        config: a DeepSpeed configuration, as a dict or the path of a JSON file. What Drivetrain sets (optimizer,
            schedule, batch size, precision, clipping, accumulation) must be absent, `"auto"`, or the same.

    Raises:
        StrategyError: at construction, for an option that is invalid or contradicts `config`.

    Example::

        >>> pipeline = pipeline.distribute("deepspeed_stage_2", devices=4, precision="bf16")
    """

    device: str | None = None
    stage: int | None = None
    offload: str | None = None
    nvme_path: str | None = None
    config: str | Path | Mapping[str, Any] | None = None

    extra = EXTRA

    def __post_init__(self) -> None:
        zero = self._zero()
        if self.nvme_path is not None and zero.offload != "nvme":
            raise StrategyError(
                f"strategy {self.name!r}: nvme_path={str(self.nvme_path)!r} has no effect, because nothing is kept on "
                "NVMe. Leave it out, or pass stage=3 and offload='nvme'."
            )

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
        return SUMMARIES[zero.stage] + (f", kept on the {zero.offload.upper()}" if zero.offload else "")

    def _zero(self) -> Zero:
        return choose_zero(self.stage, self.offload, self.nvme_path, read_config(self.config))

    def check(self, devices: int) -> None:
        """Check that DeepSpeed is installed, without importing it unless NVMe is requested. Raises `MissingExtra` if it
        is not, and `StrategyError` if `devices` ranks cannot train here."""
        check_ranks(self.name, self.device, devices)
        if importlib.util.find_spec("deepspeed") is None:
            _require()  # raises with installation instructions
        zero = self._zero()
        if zero.offload != "nvme":
            return
        if reason := reason_without_aio():
            raise StrategyError(f"strategy {self.name!r}: {reason}, or use 'deepspeed_stage_3_offload'.")
        if zero.nvme_path is None or not Path(zero.nvme_path).is_dir():
            raise StrategyError(
                f"strategy {self.name!r}: nvme_path={zero.nvme_path!r} is not a folder. Pass one on the disk to use."
            )

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Build the optimizer, then shard; see `base.Strategy.prepare`. Every rank starts with rank 0's values.

        Raises `StrategyError` for what contradicts `config`, and a model that cannot be sharded: see `FSDP.prepare`.
        """
        options = Options.of(given)
        zero = self._zero()
        _refuse_options(self.name, options, zero)
        config = make_config(zero, options, read_config(self.config), self.name)
        device = enter(self, model)
        _refuse_divided(self.name, model)
        sharding.refuse_unshardable(self.name, model)
        meta.refuse_without_reset(self.name, model)
        if not dist.is_initialized():
            if zero.offload is not None or self.config is not None:
                raise StrategyError(
                    f"strategy {self.name!r}: there is no process group, without which DeepSpeed does nothing. Start "
                    f"this with torchrun --nproc-per-node=1 or strategies.launch(…, devices=1), or use 'single'."
                )
            meta.materialise_units(model, find_blocks(model) if zero.stage == 3 else (), device)
            model = put_on(model, device, options)
            return LocalEngine(model, build_optimizer(model, optimizer_factory), device, options)
        if sharding.make_contiguous(model):
            sharding.give_channels_last_inputs(model)
        # Before anything is sharded: finding blocks, and maybe the factory, needs shapes, which stage 3 empties.
        change_layers(model, options)
        before = dict(model.named_parameters())
        optimizer = build_optimizer(model, optimizer_factory)
        _refuse_optimizer(self.name, optimizer)
        if zero.optimizer == "cpu":
            step_fused(optimizer)
        with import_deepspeed(device) as deepspeed:
            init = deepspeed.zero.Init(config_dict_or_path=config) if zero.stage == 3 else None
            _place(model, device, init)
            after = dict(model.named_parameters())
            now = {parameter: after[name] for name, parameter in before.items()}
            for group in optimizer.param_groups:
                group["params"] = [now.get(parameter, parameter) for parameter in group["params"]]
            compile_model(model, options, device)
            groups = [list(group["params"]) for group in optimizer.param_groups]
            wrapper, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )
        return DeepSpeedEngine(wrapper, deepspeed, groups, device, options, zero.stage)


def step_fused(optimizer: torch.optim.Optimizer) -> None:
    """Make torch's Adam or AdamW step with its fused kernel, unless the factory has selected an implementation.

    DeepSpeed's own DeepSpeedCPUAdam would have to be compiled on each machine, and is slower. For the flat tensors of a
    ResNet-50 and a ViT-B/16 (fp32), torch's fused AdamW takes 0.64 and 0.77 of its time (quartiles 0.57 to 0.86 and
    0.71 to 0.88), and torch's default implementation 7.0 and 9.5 times its time: medians of the ratios of 21
    interleaved steps, 2 threads of a busy AMD EPYC, torch 2.15, DeepSpeed 0.19.8. Weights differ by at most 2e-7.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        selected = group["foreach"] is not None or group["fused"] is not None
        if not (selected or group["capturable"] or group["differentiable"]):
            group["fused"] = True


def _refuse_options(strategy: str, options: Options, zero: Zero) -> None:
    if options.precision == "fp16":
        raise StrategyError(
            f"strategy {strategy!r}: precision='fp16' would have two loss scales, DeepSpeed's and torch's. Use 'bf16'."
        )
    if options.compile and zero.stage == 3:
        raise StrategyError(
            f"strategy {strategy!r}: compile={options.compile!r} does not support the hooks with which stage 3 gathers "
            f"parameters. Remove it, or use 'deepspeed_stage_2' or 'fsdp'."
        )


def _refuse_optimizer(strategy: str, optimizer: torch.optim.Optimizer) -> None:
    known = type(optimizer) in (torch.optim.Adafactor, torch.optim.Muon)
    if known or getattr(optimizer, "needs_whole_matrices", False):
        raise StrategyError(
            f"strategy {strategy!r}: {type(optimizer).__name__} needs whole matrices, but DeepSpeed flattens the "
            f"parameters of a group. Use 'ddp', 'zero_redundancy' or 'fsdp'."
        )


def _refuse_divided(strategy: str, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            raise StrategyError(
                f"strategy {strategy!r}: DeepSpeed has already sharded the parameter {name!r}. Pass a plain model."
            )


def _place(model: nn.Module, device: torch.device, init: Any) -> None:
    """Move `model` to the device with rank 0's values; block by block, each sharded immediately, if `init` is given."""
    done: set[nn.Module] = set()
    for block in (*(find_blocks(model) if init else ()), model):
        meta.materialise(model, device, done, unit=block)
        own = [module for module in block.modules() if module not in done]
        sharding.begin_like_rank_0(own, device)
        for module in own:
            # Not `Module.to`, which would also move the parameters of the blocks inside.
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
            for parameter in module.parameters(recurse=False):
                # A new view, because DeepSpeed fails on the channels-last strides that 1 × 1 convolutions keep.
                whole = parameter.data if init else parameter.data.to(device)
                parameter.data = whole.flatten().view(parameter.shape)
        if init is not None:
            init._convert_to_zero_parameters(block.parameters())
        done.update(own)


@contextmanager
def import_deepspeed(device: torch.device) -> Iterator[Any]:
    """Import DeepSpeed, and restore environment variables and its global switches at the end of the block. Its choice
    of the accelerator is kept, because engines query it all the time: a process has one kind of device."""
    # Weights & Biases, which it imports where it is installed, adds filters of warnings.
    with _environment_kept(), warnings.catch_warnings():
        os.environ["DS_ACCELERATOR"] = device.type  # else it uses CUDA if available, also for "cpu"
        # It requires one, even in a group that no launcher started, and uses it as the index of the GPU.
        os.environ["LOCAL_RANK"] = str(local_rank() or 0 if device.index is None else device.index)
        deepspeed = _require()
        chosen = deepspeed.accelerator.real_accelerator
        if chosen.get_accelerator().device_name().split(":")[0] != device.type:
            chosen.ds_accelerator = None
            chosen.get_accelerator()
        _import_muon()
        logger = logging.getLogger("DeepSpeed")
        logger.addFilter(_should_log)
        operations, autocast = deepspeed.ops.__compatible_ops__, deepspeed.runtime.torch_autocast
        before = dict(operations), autocast.TORCH_AUTOCAST_INITIALIZED
        # An all-reduce for inference, which it would compile, and announce on standard output.
        operations["deepspeed_shm_comm"] = False
        try:
            yield deepspeed
        finally:
            operations.update(before[0])
            autocast.TORCH_AUTOCAST_INITIALIZED = before[1]  # one engine in bf16 would change the next
            logger.removeFilter(_should_log)


def _require() -> Any:
    # Its autotuner, which nothing here uses, imports MLflow if it is installed: 2 s for each rank.
    modules: dict[str, Any] = sys.modules
    left_out = "mlflow" not in modules and "deepspeed" not in modules
    if left_out:
        modules["mlflow"] = None
    try:
        return require("deepspeed", EXTRA, "shard a training run with ZeRO")
    finally:
        if left_out:
            del modules["mlflow"]


def reason_without_aio() -> str:
    # DeepSpeed's own check takes seconds: run it only if the library to compile with is installed.
    if find_library("aio") is not None:
        with import_deepspeed(pick_device(None)) as deepspeed:
            builder = deepspeed.accelerator.get_accelerator().create_op_builder("AsyncIOBuilder")
            if builder is not None and builder.is_compatible(verbose=False):
                return ""
    return "DeepSpeed's async_io cannot be compiled here. Install a C++ compiler, ninja and libaio-dev"


def _import_muon() -> None:
    """Import DeepSpeed's Muon, as every `initialize` does, such that it is compiled only when it is first called:
    otherwise the import itself sets up `torch.compile`, which takes each rank 2 s, whatever the optimizer."""
    name = "deepspeed.runtime.zero.muon.original_muon"
    compiler: Any = sys.modules.get("deepspeed.runtime.compiler")
    if name in sys.modules or not hasattr(compiler, "compile"):
        return
    original = compiler.compile
    compiler.compile = _deferred(original)
    try:
        with suppress(ImportError):  # versions without it
            importlib.import_module(name)
    finally:
        compiler.compile = original


def _deferred(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory of decorators like `compile_`, which they call when the decorated function is first called."""

    def factory(*options: Any, **named: Any) -> Callable[..., Any]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled = cache(lambda: compile_(*options, **named)(function))

            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return compiled()(*args, **kwargs)

            return call

        return decorate

    return factory


def _should_log(record: logging.LogRecord) -> bool:
    """Drop two warnings about what is intended: an optimizer of torch, and autocast around the engine."""
    message = str(record.msg)
    return "untested optimizer" not in message and "torch.autocast is" not in message


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
