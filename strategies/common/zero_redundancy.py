"""Optimizers with sharded state: each rank steps the parameters it owns, and sends them to the others.

This is ZeRO's first stage. The backends expect a class and its arguments. Here the user's own optimizer is built over
all parameters and then keeps only those of its rank, so that any optimizer with any groups can be sharded. An optimizer
that combines several parameters (a norm over all of them, for example) sees only those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...common.errors import StrategyError
from ..ddp import DDPEngine
from ..options import Options
from .optimizer_state import Entry

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
