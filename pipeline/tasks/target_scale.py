"""Scaled targets: the model has their mean and standard deviation as buffers, and a hook undoes the scaling."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...common.errors import PlanError, first_of
from .task import main_key

BUFFERS = ("target_mean", "target_std")
"""Names of the buffers of the model, `(K,)` float32, in its state dict."""


class TargetScale(NamedTuple):
    mean: torch.Tensor  # (K,) float32
    std: torch.Tensor  # (K,) float32; 1 where all targets are equal

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        mean, std = self.to(values.device)
        return (values - mean) / std

    def to(self, device: torch.device) -> TargetScale:
        return TargetScale(self.mean.to(device), self.std.to(device))

    @property
    def needed(self) -> bool:
        """Whether a model whose outputs begin near 0, and change by about 1, is far from these targets."""
        return bool(((self.mean.abs() > 10) | (self.std > 10) | (self.std < 0.1)).any())

    def __str__(self) -> str:
        mean, std = (first_of([f"{value:.4g}" for value in each.tolist()], 3) for each in self)
        return f"mean {mean}, standard deviation {std}"


def fit_scale(
    labels: NDArray[Any], indices: NDArray[np.int64], weights: NDArray[np.float64], source: str
) -> TargetScale:
    """Return mean and standard deviation of each number over the samples `indices`, as float32 delivers them to the
    loss, weighted by how often each is trained on. Raise PlanError for a target that is not finite in float32."""
    indices, weights = indices[weights > 0], weights[weights > 0]
    given = labels[indices].reshape(len(indices), -1)
    with np.errstate(over="ignore"):
        values = given.astype(np.float32).astype(np.float64)
    if len(bad := np.argwhere(~np.isfinite(values))):
        row, column = bad[0]
        raise PlanError(
            f"{source} has the target {given[row, column]} in sample {indices[row]}, which is not finite in float32, "
            "so targets cannot be scaled. Convert it again without such values, or leave the sample out (indices=)."
        )
    mean = np.average(values, axis=0, weights=weights)
    std = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights)).astype(np.float32)
    std[(np.ptp(values, axis=0) == 0) | (std == 0)] = 1  # of constant targets nothing is to be divided
    return TargetScale(torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(std))


def attach_scale(model: nn.Module, scale: TargetScale) -> None:
    """Let `model` return its main tensor in the units of the targets: `float32(output) * target_std + target_mean`.
    Raise PlanError if the model has another attribute of these names."""
    if carried_scale(model) is None:
        taken = [name for name in BUFFERS if hasattr(model, name)]
        if taken:
            raise PlanError(
                f"The model has {taken[0]!r} already, the name of a buffer of Regression(scale_targets=True). Rename "
                "it, or leave out scale_targets."
            )
        model.register_forward_hook(_in_units)
    for name, value in zip(BUFFERS, scale, strict=True):
        model.register_buffer(name, value.detach().clone())


def adopt_scale(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Do the same with the scale in a state dict, if there is one that the model lacks."""
    if all(name in state for name in BUFFERS) and not any(hasattr(model, name) for name in BUFFERS):
        attach_scale(model, TargetScale(*(state[name] for name in BUFFERS)))


def carried_scale(model: nn.Module) -> TargetScale | None:
    """Return a copy of the scale that `attach_scale` gave to a model, as it is by now; None without one."""
    if _in_units not in model._forward_hooks.values():
        return None
    return TargetScale(*(getattr(model, name).detach().clone() for name in BUFFERS))


def _in_units(model: nn.Module, _: Any, outputs: Any) -> Any:
    def undone(main: torch.Tensor) -> torch.Tensor:
        mean, std = (getattr(model, name) for name in BUFFERS)
        scaled: torch.Tensor = main.float() * std + mean
        return scaled

    if isinstance(outputs, torch.Tensor):
        return undone(outputs)
    if isinstance(outputs, tuple):
        values = (undone(outputs[0]), *outputs[1:])
        return type(outputs)(*values) if hasattr(outputs, "_fields") else values
    changed, key = copy.copy(outputs), main_key(outputs)
    if key is None:
        changed.logits = undone(outputs.logits)
    else:
        changed[key] = undone(outputs[key])
    return changed
