"""Train on several ranks that each hold the full model: torch's DistributedDataParallel, and with sharded optimizer
state (ZeRO's first stage) its ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..common.checks import check_flag
from ..common.errors import StrategyError
from .base import OptimizerFactory
from .common.optimizer_state import Entry, Keep
from .common.placement import build_optimizer, check_ranks, enter, put_on
from .engine import LocalEngine, RanksEngine
from .options import Options, PrepareOptions


class DDPEngine(RanksEngine):
    @property
    def plain_model(self) -> nn.Module:
        return cast(nn.Module, self.model.module)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """DDP decides in the *forward* whether the backward communicates: `no_sync` around that alone does nothing."""
        last, wrapper = self._microbatches + 1 == self.accumulate, cast(Any, self.model)
        with nullcontext() if last else wrapper.no_sync(), super().forward_context():
            yield


@dataclass(frozen=True)
class ReplicatedStrategy:
    """Base of the strategies that keep the full model on every rank. A subclass defines how to `_wrap` it. Without a
    process group there is a single rank, and nothing to wrap."""

    device: str | None = None

    name = ""
    summary = ""

    def check(self, devices: int) -> None:
        """Raise `StrategyError` if `devices` ranks cannot train here."""
        check_ranks(self.name, self.device, devices)

    def prepare(
        self, model: nn.Module, optimizer_factory: OptimizerFactory, **given: Unpack[PrepareOptions]
    ) -> LocalEngine:
        """Move `model`, build the optimizer, and wrap; see `base.Strategy.prepare`. All start with rank 0's values."""
        options = Options.of(given)
        device = enter(self, model)
        model = put_on(model, device, options)
        optimizer = build_optimizer(model, optimizer_factory)
        if not dist.is_initialized():
            return LocalEngine(model, optimizer, device, options)
        return self._wrap(model, optimizer, device, options)

    def _wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> RanksEngine:
        raise NotImplementedError


@dataclass(frozen=True)
class DDP(ReplicatedStrategy):
    """Each rank holds the full model and trains on its shard of the batch; gradients are averaged.

    Args:
        device: `"cpu"` (gloo) or `"cuda"` (NCCL). Default None: CUDA if available, else the CPU.
        find_unused_parameters: search in every step for parameters without a gradient, which occur in models that
            freeze or alternate layers. Default False, because the search takes time.

    Example::

        >>> pipeline = pipeline.distribute("ddp", devices=4, find_unused_parameters=True)
    """

    find_unused_parameters: bool = False

    name = "ddp"
    summary = "the full model on every device, gradients averaged (DistributedDataParallel)"

    def __post_init__(self) -> None:
        check_flag("find_unused_parameters", self.find_unused_parameters, StrategyError)  # any text would be true

    def _wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> RanksEngine:
        return DDPEngine(self._data_parallel(model, device), optimizer, device, options)

    def _data_parallel(self, model: nn.Module, device: torch.device) -> nn.Module:
        wrapper = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            # Gradients live in the communication buckets instead of separately: 4 bytes per parameter less.
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
        )
        wrapper.broadcast_buffers = False  # `sync_buffers` pools them; the option would also skip the first broadcast
        return wrapper


Groups = list[dict[str, Any]]


def copy_groups(optimizer: torch.optim.Optimizer) -> Groups:
    return [{**group, "params": list(group["params"])} for group in optimizer.param_groups]


def keep_part(optimizer: torch.optim.Optimizer) -> Callable[..., torch.optim.Optimizer]:
    """Return what backends call in place of the optimizer's class, so that any optimizer with any groups can be
    sharded: given this rank's part of `copy_groups`, it returns `optimizer` with only these. A group of which the rank
    owns nothing is kept, empty: backends match options to groups by index."""

    def keep(own: Groups, **defaults: object) -> torch.optim.Optimizer:  # noqa: ARG001
        for group, part in zip(optimizer.param_groups, own, strict=True):
            group["params"] = list(part["params"])
        kept = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in [p for p in optimizer.state if p not in kept]:
            del optimizer.state[parameter]  # some optimizers (Adagrad) create their state immediately
        return optimizer

    return keep


def refuse_dtypes(strategy: str, model: nn.Module) -> None:
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    first = next(iter(trained.values()), None)
    for name, dtype in trained.items():
        if dtype != first:
            raise StrategyError(
                f"strategy {strategy!r}: the parameter {name!r} is {dtype} and others are {first}, but it requires one "
                "dtype. Convert them, or use 'ddp'."
            )


@dataclass(frozen=True)
class Remote:
    """A tensor of the optimizer's state that `rank` has, and what the others need in order to receive it."""

    rank: int
    shape: torch.Size
    dtype: torch.dtype

    def send(self, value: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Return the tensor on every rank, sent by the one that has it as `value`; all ranks must call it."""
        if value is None:
            value = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            value = value.detach().to(device, memory_format=torch.contiguous_format)
        dist.broadcast(value, src=self.rank)
        return value


class OwnedEngine(DDPEngine):
    """A wrapped model with its optimizer state on the owning ranks. `optimizer.optim` has what this rank owns."""

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device, options: Options) -> None:
        super().__init__(model, optimizer, device, options)
        local: torch.optim.Optimizer = optimizer.optim
        optimizer.state = local.state  # one dict: what is read and loaded there is what is stepped
        optimizer.defaults = local.defaults  # by which a scheduler recognizes momentum
        self._own = [parameter for group in local.param_groups for parameter in group["params"]]
        self._owned = set(self._own)

    def _entries(self, names: Mapping[nn.Parameter, str]) -> Mapping[str, Entry]:
        own = super()._entries(names)
        described = {n: {k: self._described(v) for k, v in entry.items()} for n, entry in own.items()}
        of_ranks: list[dict[str, dict[str, Any]]] = [{}] * self.world_size
        dist.all_gather_object(of_ranks, described)  # names, shapes and single numbers only
        return {name: entry for rank in of_ranks for name, entry in rank.items()}

    def _described(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return Remote(self.rank, value.shape, value.dtype) if value.dim() else value.detach().cpu()

    def _exported(
        self, parameter: nn.Parameter, name: str, key: str, value: object, keep: Keep | None
    ) -> torch.Tensor | float:
        if isinstance(value, Remote):
            mine = self.optimizer.state[parameter][key] if value.rank == self.rank else None
            value = value.send(mine, self.device)
        return super()._exported(parameter, name, key, value, keep)

    def _owns(self, parameter: nn.Parameter) -> bool:
        return parameter in self._owned


@dataclass(frozen=True)
class ZeroRedundancy(DDP):
    """`DDP`, but each rank holds the optimizer's state of the parameters it owns, and steps only these.

    With AdamW in fp32 a rank holds 8 + 8/N instead of 16 bytes per parameter (ZeRO's first stage). Entire parameters
    are assigned to ranks, largest first: a model with one huge parameter is balanced badly. See `DDP` for the options.
    An optimizer that combines several parameters (a norm over all of them, for example) sees only those of one rank.

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
        from torch.distributed.optim import ZeroRedundancyOptimizer  # here: DDP does without its import

        divide: Any = ZeroRedundancyOptimizer  # its signature expects a class, which it only calls
        divided = divide(copy_groups(optimizer), keep_part(optimizer))
        return OwnedEngine(wrapper, divided, device, options)
