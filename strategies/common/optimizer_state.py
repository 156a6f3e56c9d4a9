"""An optimizer's state by parameter names, in the same form for every strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...common.checks import plain
from ...common.errors import StrategyError

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of a parameter group that select torch's implementation, not its result; set where the optimizer is built."""
Names = Mapping[nn.Parameter, str]
Keep = Callable[[str], bool]
"""Selects the tensors of an export that this rank keeps, by parameter name. All ranks take part in gathering each."""
Entry = Mapping[str, torch.Tensor | float | int | bool]
"""One parameter's state: `{"exp_avg": tensor of the parameter's shape, "step": 0-dim tensor}`."""


def as_held(name: str) -> bool:  # noqa: ARG001
    """A `Keep` of every tensor as this rank holds it, a DTensor or a `FlatShard` if it is sharded: none is copied."""
    return True


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state as plain values: full CPU tensors and JSON types, by plain parameter names."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    """The parameter groups in order: hyperparameters as JSON types, and `"params"`, a list of names."""
    entries: Mapping[str, Entry] = field(default_factory=dict)
    """State by parameter name. A parameter that has never been stepped has none."""
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    """The state of fp16's loss scale (`torch.amp.GradScaler.state_dict`); empty in other precisions."""


def export_groups(optimizer: torch.optim.Optimizer, names: Names) -> list[dict[str, Any]]:
    groups = []
    for group in optimizer.param_groups:
        plain = {key: _plain(key, value) for key, value in group.items() if key != "params"}
        groups.append({**plain, "params": [name_of(parameter, names) for parameter in group["params"]]})
    return groups


def import_groups(optimizer: torch.optim.Optimizer, names: Names, groups: list[dict[str, Any]]) -> None:
    """Set the hyperparameters of `groups` on `optimizer`'s groups; its implementation options are kept."""
    here = [[name_of(p, names) for p in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in groups]
    if here != there:
        only = sorted(set().union(*here) ^ set().union(*there))
        difference = f", and {only[0]!r} is in only one of them" if only else ""
        raise StrategyError(
            f"import_optimizer: the saved optimizer has groups of {[len(g) for g in there]} parameters, this one "
            f"of {[len(g) for g in here]}{difference}. Build it with the same transforms and the same factory."
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key not in ("params", *IMPLEMENTATION):
                group[key] = _like(group.get(key), value)


def name_of(parameter: nn.Parameter, names: Names) -> str:
    if parameter not in names:
        raise StrategyError(
            f"The optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's, so it has no "
            f"name to be saved under. Register it in the model."
        )
    return names[parameter]


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()  # a learning rate that compiled or captured code reads
    if isinstance(value, tuple | list):
        return [_plain(key, each) for each in value]
    value = plain(value)  # NumPy's numbers, which an optimizer takes
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StrategyError(
        f"export_optimizer: the optimizer's {key!r} is a {type(value).__name__}, which cannot be saved. Use numbers, "
        f"strings and lists of them."
    )


def _like(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor):  # JSON has neither tensors nor tuples
        return present.new_tensor(value)
    return tuple(value) if isinstance(value, list) and isinstance(present, tuple) else value
