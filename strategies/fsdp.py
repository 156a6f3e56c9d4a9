"""Training on several ranks that each keep a part of every parameter: torch's FSDP2, `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from .. import machine
from ..errors import StrategyError
from .base import OptimizerFactory
from .common.materialise import materialise, refuse_without_reset
from .common.module_filter import Policy, check_policy
from .common.placement import build_optimizer, check_ranks, compile_in_place, enter, put_on
from .common.recompute import recompute_activations
from .common.sharding import (
    begin_like_rank_0,
    give_channels_last_inputs,
    make_contiguous,
    mixed_precision,
    refuse_unshardable,
    units,
)
from .devices import pick_device
from .engine import LocalEngine, RanksEngine
from .options import Options, PrepareOptions


class FSDPEngine(RanksEngine):
    """A model whose parameters are sharded; see `base.Engine` for what each method promises.

    Every forward, in evaluation too, and `export_state` gather parameters from all ranks: all ranks must
    make the same calls, in the same order. A forward in evaluation leaves parameters gathered (those outside
    of the blocks; under `fsdp_grad_op` all) until the next backward, `step` or `export_state`.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> None:
        super().__init__(model, optimizer, device, options)
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]

    @property
    def divided(self) -> bool:
        """Whether parameters are divided among the ranks: all are."""
        return True

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        """Adds the gradients of `loss / accumulate`; on the last microbatch they are reduced and sharded.

        Before that a rank holds its own gradients whole, 4 bytes per parameter.

        Raises:
            StrategyError: as `base.Engine.backward`.
        """
        if self.accumulate > 1:
            for module in self._sharded:
                module.set_requires_gradient_sync(last_microbatch, recurse=False)
        super().backward(loss, last_microbatch)

    def step(self) -> torch.Tensor | None:
        """Clips, steps and zeroes; see `LocalEngine.step`."""
        # An evaluation since the backward may have left parameters gathered; the next forward would use these
        # copies, made before the step.
        self._shard_again()
        return super().step()

    def _shard_again(self) -> None:
        for module in self._sharded:
            module.reshard()

    def _clip(self, clip_norm: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        whole: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        """`value` whole; all ranks must call it for a DTensor, whose parts they exchange."""
        if not isinstance(value, DTensor):
            return value
        # An offloaded part is on the CPU, and its mesh may be one of CUDA devices.
        part = cast(DTensor, value.to(self.device))
        whole: torch.Tensor = part.full_tensor()
        return whole

    def _part(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(like, DTensor):
            return whole
        mesh = like.device_mesh
        # Every rank has the same values already: none is sent.
        part: torch.Tensor = distribute_tensor(
            whole.to(self.device), mesh, like.placements, src_data_rank=None
        )
        return part.to(like.device)

    def _tensors(self, caller: str) -> dict[str, torch.Tensor]:
        self._shard_again()
        return super()._tensors(caller)


@dataclass(frozen=True)
class FSDP:
    """Parameters, gradients and optimizer state are divided among the ranks (FSDP2, `fully_shard`).

    Each rank keeps 16/N instead of 16 bytes per parameter with AdamW in fp32. The model's units, which `wrap`
    chooses, are gathered one at a time for their forward, freed, and gathered again for their backward; what is
    outside of them is gathered from the forward's start to the backward's end.

    `prepare` changes the model in place. Weights that are channels-last are made contiguous, because
    `fully_shard` takes no others, and images are then made channels-last on their way into the model
    instead: activations have the layout that was asked for, and the numbers are the same.

    Precision "bf16" (or "fp16") computes and gathers in it and keeps fp32 parameters, reduces gradients in fp32,
    and runs the forward under autocast as the other strategies do. BatchNorm's parameters stay fp32, beside its
    statistics. Outputs may be of half precision; compute losses from `outputs.float()`.

    A model on the meta device gets its values unit by unit, from each module's `reset_parameters` with rank
    0's random numbers, so that it need not fit on one device. What the model's own constructor would have
    changed after that (many set their convolutions anew) is not repeated: load weights, or build on the CPU.

    With `compile` each unit is compiled by itself, and what is outside of them is not.

    Alone in a process, without a process group, there is nothing to divide, and it trains like `single`.

    Args:
        device: `"cpu"` (gloo) or `"cuda"` (NCCL, see `devices.rank_device`); None takes CUDA if there
            is any, else the CPU.
        wrap: the units: True, because it suits most models, for the blocks of `blocks.find_blocks`, if there are
            any; class names, or a function of name and module; False for none but the whole model. Units may be
            inside each other. A module that shares a parameter with one outside of it is left to whatever holds
            both, and one that is never called itself must not be chosen: its parameters would stay divided.

    Raises:
        StrategyError: at construction, for a `wrap` that means nothing.
    """

    device: str | None = None
    wrap: Policy = True

    name = "fsdp"
    summary = "parameters, gradients and optimizer state divided among the devices (FSDP2)"

    def __post_init__(self) -> None:
        check_policy(self.wrap, f"strategy {self.name!r}: wrap")

    def check(self, devices: int) -> None:
        """Raises StrategyError if `devices` ranks cannot train here."""
        check_ranks(self.name, self.device, devices)

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Shards `model` in place, then builds the optimizer of the shards; see `base.Strategy.prepare`.

        Rank 0's weights and buffers become everyone's.

        Raises:
            StrategyError: for an argument that means nothing, a device that is not here, or a model that
                cannot be sharded: without anything that `wrap` chooses, wrapped or sharded already, with a
                parameter of no dimension or no shape yet, a module on the meta device that cannot be reset, a
                SyncBatchNorm on the CPU, or a BatchNorm in bf16 on a torch that is too old.
        """
        options = Options.of(given)
        device = enter(self, model)
        refuse_unshardable(self.name, model)
        refuse_without_reset(self.name, model)
        chosen = units(self.name, model, self.wrap)
        if not dist.is_initialized():
            self._check_alone(device)
            materialise(model, device)
            model = put_on(model, device, options)
            return LocalEngine(model, build_optimizer(model, optimizer_factory), device, options)
        self._shard(model, chosen, device, options)
        return FSDPEngine(model, build_optimizer(model, optimizer_factory), device, options)

    def _check_alone(self, device: torch.device) -> None:
        """Raises StrategyError if it cannot do without a process group."""

    def _shard(
        self, model: nn.Module, chosen: list[nn.Module], device: torch.device, options: Options
    ) -> None:
        if options.precision != "fp32":
            mixed_precision(self.name, model, options.precision)  # refuses before anything has changed
        if make_contiguous(model):
            give_channels_last_inputs(model)
        how = {"mesh": self._mesh(device), **self._sharding(device)}
        recompute_activations(model, options.activation_checkpointing)
        done: set[nn.Module] = set()
        for unit in (*chosen, model):
            materialise(unit, device, done)
            own = [module for module in unit.modules() if module not in done]
            begin_like_rank_0(own, device)
            if options.precision != "fp32":
                how["mp_policy"] = mixed_precision(self.name, unit, options.precision)
            if unit is not model:  # around the whole, each gathering would break the graph
                compile_in_place(unit, options.compile)
            fully_shard(unit, **how)
            done.update(own)

    def _sharding(self, device: torch.device) -> dict[str, Any]:  # noqa: ARG002
        """Options of `fully_shard`, whose default frees a block's parameters after its forward."""
        return {}

    def _mesh(self, device: torch.device) -> DeviceMesh:
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))


@dataclass(frozen=True)
class FSDPGradOp(FSDP):
    """`FSDP`, but parameters stay gathered from their forward to their backward.

    Saves the second gathering, and takes 4 bytes per parameter more (2 in bf16) while it lasts. See `FSDP`.
    """

    name = "fsdp_grad_op"
    summary = "like fsdp, but parameters stay gathered from forward to backward"

    def _sharding(self, device: torch.device) -> dict[str, Any]:  # noqa: ARG002
        return {"reshard_after_forward": False}


@dataclass(frozen=True)
class FSDPCPUOffload(FSDP):
    """`FSDP`, but each rank's part, its gradients and the optimizer with its state are on the CPU.

    A device holds one gathered block and the activations; the optimizer steps on the CPU. See `FSDP`. A GPU
    needs a process group also when it is the only one: torchrun or `strategies.launch(..., devices=1)`, which a
    Pipeline does by itself. Alone on the CPU there is nothing to offload, and it trains like `single`.
    """

    name = "fsdp_cpu_offload"
    summary = "like fsdp, but what is divided is kept on the CPU, which also steps"

    @property
    def needs_group(self) -> bool:
        """Whether `prepare` needs a process group even on one device."""
        return pick_device(self.device).type == "cuda"

    def _check_alone(self, device: torch.device) -> None:
        # Not made here: a group that stayed would be in the way of the next `launch` in this process.
        if device.type == "cuda":
            raise StrategyError(
                "strategy 'fsdp_cpu_offload': there is no process group, without which nothing can be offloaded; "
                "start this with torchrun --nproc-per-node=1 or strategies.launch(…, devices=1), or use 'single'."
            )

    def _shard(
        self, model: nn.Module, chosen: list[nn.Module], device: torch.device, options: Options
    ) -> None:
        # The norm of gradients on the CPU is reduced there.
        if "cpu" not in str(dist.get_backend_config()):
            raise StrategyError(
                f"strategy 'fsdp_cpu_offload': the process group ({dist.get_backend_config()}) serves no CPU "
                f"tensors; initialise it with the backend 'cpu:gloo,cuda:nccl'."
            )
        super()._shard(model, chosen, device, options)

    def _sharding(self, device: torch.device) -> dict[str, Any]:
        # Memory is pinned for copies to a GPU: on the CPU it would cost, and touch a GPU that is not used.
        return {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}


@dataclass(frozen=True)
class HSDP(FSDP):
    """`FSDP` inside groups of ranks, each of which holds the whole model; gradients are averaged over all.

    Parameters are gathered within a group only, over its fast links; see `FSDP`.

    Args:
        device, wrap: as for `FSDP`.
        shard_size: ranks in a group; must divide the number of ranks. Default: the ranks of one machine,
            whose links to each other are the fast ones.
    """

    shard_size: int | None = None

    name = "hsdp"
    summary = "like fsdp inside groups of devices (by default a machine's), each with the whole model"

    def check(self, devices: int) -> None:
        """Raises StrategyError if `devices` ranks cannot train here, or do not divide into groups."""
        super().check(devices)
        size = self._group_size(devices)
        if size < 1 or devices % size:
            raise StrategyError(
                f"strategy 'hsdp': shard_size={size} must be 1 or more and divide the {devices} devices."
            )

    def _group_size(self, devices: int) -> int:
        if self.shard_size is not None:
            return self.shard_size
        return min(devices, machine.local_ranks(devices))

    def _mesh(self, device: torch.device) -> DeviceMesh:
        devices = dist.get_world_size()
        shape = (devices // self._group_size(devices), self._group_size(devices))
        return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
