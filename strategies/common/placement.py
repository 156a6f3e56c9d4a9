"""What every strategy looks at before it touches a model: the device, the ranks, and the model's parts."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ... import machine
from ...errors import StrategyError
from ..base import OptimizerFactory
from ..devices import pick_device, rank_device, refuse_shared_gpu
from ..launching.group import is_rank, join_group, under_torchrun
from ..options import Options
from .recompute import recompute_activations

RANKS_PER_CORE = 8
"""As many as are started on a CPU: enough to try out many ranks, and few enough for a machine to stay usable."""


class OnRanks(Protocol):
    """What `enter` needs of a strategy."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str | None: ...

    def check(self, devices: int) -> None: ...


def enter(strategy: OnRanks, model: nn.Module) -> torch.device:
    """Joins the process group under torchrun, checks that `strategy` can train here, and says on which device.

    Raises:
        StrategyError: if it cannot, or the model has a SyncBatchNorm and this rank trains on the CPU.
    """
    if not dist.is_initialized() and under_torchrun():
        join_group(device=strategy.device)
    strategy.check(dist.get_world_size() if dist.is_initialized() else 1)
    device = rank_device(strategy.device)
    if device.type == "cuda" and dist.is_initialized():
        refuse_shared_gpu(device)
        # It stays this process's: NCCL, and FSDP2 at its first forward, take the current one.
        torch.cuda.set_device(device)
    refuse_sync_batch_norm(strategy.name, model, device)
    parameters_to_train(model)
    return device


def check_ranks(strategy: str, device: str | None, devices: int) -> None:
    """Checks the surroundings of a strategy that runs on several ranks; `device` is its option.

    Raises:
        StrategyError: if `devices` ranks cannot train here.
    """
    if devices < 1:
        raise StrategyError(f"strategy {strategy!r}: devices={devices} must be 1 or more.")
    if not dist.is_available():
        raise StrategyError(f"strategy {strategy!r}: this torch is built without torch.distributed.")
    if device not in (None, "cpu", "cuda"):
        raise StrategyError(
            f"strategy {strategy!r}: device={device!r} is not one for all ranks; use 'cpu' or 'cuda' "
            f"(the index is the rank's), or 'single' for one given device."
        )
    if is_rank():
        # Those of one machine see the same GPUs, or each one of its own. The check of the largest number is the
        # same on all of them, so that none waits for another that has failed.
        alone = torch.cuda.device_count() == 1
        found = pick_device(device, 0 if alone else machine.local_ranks() - 1)
    else:
        found = pick_device(device, machine.local_ranks(devices) - 1)
    cores = machine.cores()
    if found.type == "cpu" and devices > RANKS_PER_CORE * cores and not is_rank():
        raise StrategyError(
            f"strategy {strategy!r}: devices={devices} would start {devices} processes on the {cores} CPU core(s) "
            f"here; use at most {RANKS_PER_CORE * cores}. Where ranks run on other machines, start them by torchrun."
        )


def refuse_sync_batch_norm(strategy: str, model: nn.Module, device: torch.device) -> None:
    """Raises StrategyError for a SyncBatchNorm on the CPU, naming it."""
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise StrategyError(
                f"strategy {strategy!r}: {name or 'the model'} is a SyncBatchNorm, which works on CUDA only, "
                f"and this rank trains on the CPU; use BatchNorm2d there."
            )


def parameters_to_train(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model` that require gradients.

    Raises:
        StrategyError: if there are none.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise StrategyError(
            f"prepare: {type(model).__name__} has no parameter that requires a gradient, so nothing would "
            f"train; set requires_grad on those that should."
        )
    return parameters


def build_optimizer(model: nn.Module, factory: OptimizerFactory) -> torch.optim.Optimizer:
    """The factory's optimizer over the parameters of `model` that require gradients.

    Raises:
        StrategyError: if there are none.
    """
    return factory(parameters_to_train(model))


def compile_in_place(module: nn.Module, compile: bool | str) -> None:
    """Has `torch.compile` compile the module at its first call, as `Options.compile` says; no name changes."""
    if compile:
        module.compile(mode=compile if isinstance(compile, str) else None)


def put_on(model: nn.Module, device: torch.device, options: Options) -> nn.Module:
    """`model` on `device`, with what `options` ask of a model that one device holds whole; before its optimizer."""
    model = model.to(device)
    recompute_activations(model, options.activation_checkpointing)
    compile_in_place(model, options.compile)
    return model
