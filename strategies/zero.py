"""Train on several ranks with sharded optimizer state: torch's ZeroRedundancyOptimizer over DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from ..common.errors import StrategyError
from .common.optimizer_state import Entry
from .ddp import DDP, DDPEngine
from .engine import RanksEngine
from .options import Options

Groups = list[dict[str, Any]]


def copy_groups(optimizer: torch.optim.Optimizer) -> Groups:
    """Return the groups of `optimizer` with all their options, for a backend to partition."""
    return [{**group, "params": list(group["params"])} for group in optimizer.param_groups]


def keep_part(optimizer: torch.optim.Optimizer) -> Callable[..., torch.optim.Optimizer]:
    """Return a callable for the backend: given this rank's part of `copy_groups`, it returns `optimizer` with only
    these. A group of which the rank owns nothing is kept, empty: backends match options to groups by index."""

    def keep(own: Groups, **defaults: object) -> torch.optim.Optimizer:  # noqa: ARG001
        for group, part in zip(optimizer.param_groups, own, strict=True):
            group["params"] = list(part["params"])
        kept = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in [p for p in optimizer.state if p not in kept]:
            del optimizer.state[parameter]  # some optimizers (Adagrad) create their state immediately
        return optimizer

    return keep


def refuse_dtypes(strategy: str, model: nn.Module) -> None:
    """Raise `StrategyError`, naming a parameter, unless all that are trained have one dtype."""
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
    """A wrapped model with its optimizer state on the owning ranks. `optimizer` has all groups and parameters, and as
    `optim` the optimizer of those that this rank owns."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, options: Options
    ) -> None:
        super().__init__(model, optimizer, device, options)
        local: torch.optim.Optimizer = optimizer.optim  # type: ignore[attr-defined]
        optimizer.state = local.state  # one dict: what is read and loaded there is what is stepped
        optimizer.defaults = local.defaults  # by which a scheduler recognises momentum
        self._own = [parameter for group in local.param_groups for parameter in group["params"]]
        self._owned = set(self._own)

    def _entries(self, names: Mapping[nn.Parameter, str]) -> Mapping[str, Entry]:
        own = super()._entries(names)
        described = {
            name: {key: self._described(value) for key, value in entry.items()} for name, entry in own.items()
        }
        of_ranks: list[dict[str, dict[str, Any]]] = [{}] * self.world_size
        dist.all_gather_object(of_ranks, described)  # names, shapes and single numbers only
        return {name: entry for rank in of_ranks for name, entry in rank.items()}

    def _described(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return Remote(self.rank, value.shape, value.dtype) if value.dim() else value.detach().cpu()

    def _exported(
        self, parameter: nn.Parameter, name: str, key: str, value: object, home: int | None
    ) -> torch.Tensor | float:
        if isinstance(value, Remote):
            mine = self.optimizer.state[parameter][key] if value.rank == self.rank else None
            value = value.send(mine, self.device)
        return super()._exported(parameter, name, key, value, home)

    def _owns(self, parameter: nn.Parameter) -> bool:
        return parameter in self._owned


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
