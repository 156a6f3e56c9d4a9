"""Train on several ranks that each keep a shard of every parameter: torch's FSDP2, `fully_shard`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Unpack, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ..common import machine
from ..common.checks import is_whole
from ..common.errors import StrategyError
from ..common.rows import chunk, shard_of
from ..common.storage.tensors import rows_of, shape_of
from .base import OptimizerFactory
from .common import meta, sharding
from .common.blocks import ModuleFilter, check_filter
from .common.memory import gathered_bytes
from .common.placement import build_optimizer, change_layers, check_ranks, compile_in_place, enter, put_on
from .devices import pick_device
from .engine import LocalEngine, RanksEngine
from .options import Options, Precision, PrepareOptions


class FSDPEngine(RanksEngine):
    """A model with sharded parameters. A forward in evaluation leaves parameters gathered (those outside of the blocks;
    with `fsdp_grad_op` all) until the next backward, `step` or `export_state`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> None:
        super().__init__(model, optimizer, device, options)
        own = filter(None, map(shard_of, model.parameters()))
        self.shards = next((shards for shards, _ in own), 0)

    @cached_property
    def _units(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    @property
    def sharded(self) -> bool:
        return True

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        # Before the last microbatch a rank holds its own gradients in full, 4 bytes per parameter.
        if self.accumulate > 1:
            for module in self._units:
                module.set_requires_gradient_sync(last_microbatch, recurse=False)
        super().backward(loss, last_microbatch)

    def step(self) -> torch.Tensor | None:
        # An evaluation after the backward may have left parameters gathered, which the next forward would use.
        self.reshard()
        return super().step()

    def reshard(self) -> None:
        for module in self._units:
            module.reshard()

    def _clip(self, clip_norm: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gather(self, value: torch.Tensor, home: int | None = None) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value
        # An offloaded shard is on the CPU, but its mesh may be one of CUDA devices.
        part = cast(DTensor, value.to(self.device))
        mesh = part.device_mesh
        if home is not None and part.placements == (Shard(0),) and mesh.size() == dist.get_world_size():
            return sharding.gathered_rows(part.to_local(), part.shape[0], home, mesh.get_group())
        return part.full_tensor()

    def _read(self, source: Mapping[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
        own = shard_of(like)
        if own is None:
            return super()._read(source, name, like)
        shape = torch.Size(shape_of(source, name))
        rows = rows_of(source, name, *chunk(shape[0], *own))
        mesh, placements = cast(DTensor, like).device_mesh, cast(DTensor, like).placements
        stride = torch.empty(shape, device="meta").stride()
        value = DTensor.from_local(rows.to(self.device), mesh, placements, run_check=False, shape=shape, stride=stride)
        return value.to(like.device)

    def _tensors(self, caller: str) -> dict[str, torch.Tensor]:
        self.reshard()
        return super()._tensors(caller)


@dataclass(frozen=True)
class FSDP:
    """Shard parameters, gradients and optimizer state across the ranks (FSDP2, `fully_shard`).

    With AdamW in fp32 each rank holds 16/N instead of 16 bytes per parameter. The model's units, selected by `wrap`,
    are gathered one at a time for their forward, freed, and gathered again for their backward; parameters outside of
    them are gathered from the start of the forward to the end of the backward.

    `prepare` changes the model in place. Channels-last weights are made contiguous, because `fully_shard` accepts no
    others, and the model's input images are made channels-last instead: activations keep the requested layout.

    Precision "bf16" (or "fp16") computes and gathers in it, keeps fp32 parameters, reduces gradients in fp32, and runs
    the forward under autocast like the other strategies. BatchNorm's parameters and statistics stay fp32. Outputs may
    be in half precision; compute losses from `outputs.float()`.

    A model on the meta device is initialized unit by unit, by each module's `reset_parameters` with rank 0's random
    numbers, so that it need not fit on one rank; a seed gives the same values for any number of ranks. They are not
    those of the model on the CPU, where a seed draws in another order, and changes that its own constructor makes
    afterwards (many re-initialize their convolutions) are not repeated: load weights, or build it on the CPU. A
    pipeline also takes modules without `reset_parameters`, if a checkpoint or `init_from` has their weights.

    With `compile` each unit is compiled separately; modules outside of units are not compiled, and a model without any
    is refused. Without a process group there is nothing to shard, and it trains like `single`.

    Args:
        device: `"cpu"` (gloo) or `"cuda"` (NCCL). Default None: CUDA if available, else the CPU.
        wrap: the units. Default True, which suits most models: the blocks of `blocks.find_blocks`, if there are any.
            Or class names, or a function of name and module; False for only the full model. Units may be nested. A
            module that shares a parameter with an outside module is left to the module that contains both. Do not
            select a module that is never called itself: its parameters would stay sharded.

    Raises:
        StrategyError: at construction, for an invalid `wrap`.

    Example::

        >>> pipeline = pipeline.distribute("fsdp", devices=4, precision="bf16", activation_checkpointing=True)
    """

    device: str | None = None
    wrap: ModuleFilter = True

    reshards: ClassVar[bool] = True  # frees a block's parameters after its forward

    name = "fsdp"
    summary = "parameters, gradients and optimizer state sharded across the devices (FSDP2)"

    def __post_init__(self) -> None:
        check_filter(self.wrap, f"strategy {self.name!r}: wrap")

    def check(self, devices: int) -> None:
        """Raise `StrategyError` if `devices` ranks cannot train here."""
        check_ranks(self.name, self.device, devices)

    def gathered_bytes(self, model: nn.Module, precision: Precision) -> int:
        """Return what a rank holds at most beside its shards; the model may be on the meta device."""
        chosen = sharding.units(self.name, model, self.wrap)
        width = 4 if precision == "fp32" else 2
        return gathered_bytes(model, chosen, width, until_backward=not self.reshards)

    def shards(self, devices: int) -> int:
        """Over how many of so many ranks a parameter is sharded."""
        return devices

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Shard `model` in place, then build the optimizer of the shards. Every rank starts with rank 0's values.

        Raises `StrategyError` for a model that cannot be sharded: without anything that `wrap` selects, already wrapped
        or sharded, with a parameter of no dimension or without a shape yet, a module on the meta device that cannot be
        initialized, a SyncBatchNorm on the CPU, or a BatchNorm in bf16 with an old torch.
        """
        options = Options.of(given)
        device = enter(self, model)
        sharding.refuse_unshardable(self.name, model)
        meta.refuse_without_reset(self.name, model)
        chosen = sharding.units(self.name, model, self.wrap)
        if not dist.is_initialized():
            self._check_alone(device)
            meta.materialise_units(model, chosen, device)
            model = put_on(model, device, options)
            return LocalEngine(model, build_optimizer(model, optimizer_factory), device, options)
        if options.compile and not chosen:
            raise StrategyError(
                f"strategy {self.name!r}: compile={options.compile!r} compiles the units that are gathered, but "
                f"{type(model).__name__} has none. Pass wrap=… with the modules to gather, leave compile out, or use "
                f"'ddp'."
            )
        self._shard(model, chosen, device, options)
        return FSDPEngine(model, build_optimizer(model, optimizer_factory), device, options)

    def _check_alone(self, device: torch.device) -> None:
        pass

    def _shard(self, model: nn.Module, chosen: list[nn.Module], device: torch.device, options: Options) -> None:
        if options.precision != "fp32":
            # Here because it raises before anything has changed.
            sharding.mixed_precision(self.name, model, options.precision)
        if sharding.make_contiguous(model):
            sharding.give_channels_last_inputs(model)
        shared = {"mesh": self._mesh(device), **self._sharding(device)}
        change_layers(model, options)
        done: set[nn.Module] = set()
        for unit in (*chosen, model):
            meta.materialise(model, device, done, unit=unit)
            own = [module for module in unit.modules() if module not in done]
            sharding.begin_like_rank_0(own, device)
            if options.precision != "fp32":
                shared["mp_policy"] = sharding.mixed_precision(self.name, unit, options.precision)
            if unit is not model:  # around the full model, each gathering would break the graph
                compile_in_place(unit, options, device)
            fully_shard(unit, **shared)
            done.update(own)

    def _sharding(self, device: torch.device) -> dict[str, Any]:  # noqa: ARG002
        # True is not its default, by which the parameters outside of the units stay gathered.
        return {} if self.reshards else {"reshard_after_forward": False}

    def _mesh(self, device: torch.device) -> DeviceMesh:
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))


@dataclass(frozen=True)
class FSDPGradOp(FSDP):
    """`FSDP`, but parameters stay gathered from their forward to their backward.

    Saves the second gathering, but holds 4 more bytes per parameter (2 in bf16) in between. See `FSDP`.

    Example::

        >>> pipeline = pipeline.distribute("fsdp_grad_op", devices=4)
    """

    name = "fsdp_grad_op"
    summary = "like fsdp, but parameters stay gathered from forward to backward"
    reshards = False


@dataclass(frozen=True)
class FSDPCPUOffload(FSDP):
    """`FSDP` with each rank's shard, its gradients and the optimizer with its state on the CPU.

    A device holds one gathered block and the activations; the optimizer steps on the CPU. See `FSDP`. A GPU needs a
    process group even if it is the only one: torchrun or `strategies.launch(..., devices=1)`, which a Pipeline does
    automatically. With only the CPU there is nothing to offload, and it trains like `single`.

    Example::

        >>> pipeline = pipeline.distribute("fsdp_cpu_offload", devices=4)
    """

    name = "fsdp_cpu_offload"
    summary = "like fsdp, but the shards are kept on the CPU, which also steps"

    @property
    def needs_group(self) -> bool:
        """Whether `prepare` needs a process group even on one device."""
        return pick_device(self.device).type == "cuda"

    def _check_alone(self, device: torch.device) -> None:
        # Not created here: a group that stays open would break the next `launch` in this process.
        if device.type == "cuda":
            raise StrategyError(
                "strategy 'fsdp_cpu_offload': there is no process group, without which nothing can be offloaded. Start "
                "this with torchrun --nproc-per-node=1 or strategies.launch(…, devices=1), or use 'single'."
            )

    def _shard(self, model: nn.Module, chosen: list[nn.Module], device: torch.device, options: Options) -> None:
        # The norm of gradients on the CPU is reduced there.
        if "cpu" not in str(dist.get_backend_config()):
            raise StrategyError(
                f"strategy 'fsdp_cpu_offload': the process group ({dist.get_backend_config()}) does not support CPU "
                f"tensors. Initialize it with the backend 'cpu:gloo,cuda:nccl'."
            )
        super()._shard(model, chosen, device, options)

    def _sharding(self, device: torch.device) -> dict[str, Any]:
        # Pinned memory is for copies to a GPU: on the CPU it would take time, and initialize an unused GPU.
        return {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}


@dataclass(frozen=True)
class HSDP(FSDP):
    """`FSDP` inside groups of ranks, each with the full model; gradients are averaged over all.

    Parameters are gathered only within a group, over its fast links; see `FSDP`.

    Args:
        device, wrap: as for `FSDP`.
        shard_size: number of ranks in a group; must divide the world size. Default None: those of one machine.

    Example::

        >>> pipeline = pipeline.distribute("hsdp", devices=4, shard_size=2)
    """

    shard_size: int | None = None

    name = "hsdp"
    summary = "like fsdp inside groups of devices (by default a machine's), each with the full model"

    def check(self, devices: int) -> None:
        """Raise `StrategyError` if `devices` ranks cannot train here, or cannot be split into groups."""
        super().check(devices)
        size = self._group_size(devices)
        if not is_whole(size, 1) or devices % size:
            raise StrategyError(
                f"strategy 'hsdp': shard_size={size!r} must be a positive integer that divides the {devices} devices."
            )

    def shards(self, devices: int) -> int:
        return self._group_size(devices)

    def _group_size(self, devices: int) -> int:
        size = self.shard_size
        return min(devices, machine.local_ranks(devices)) if size is None else size

    def _mesh(self, device: torch.device) -> DeviceMesh:
        devices = dist.get_world_size()
        shape = (devices // self._group_size(devices), self._group_size(devices))
        return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
