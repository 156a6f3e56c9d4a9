"""NoWeightDecay: no weight decay for normalization layers and biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.errors import PlanError
from .base import OptimizerFactory, Transform


@dataclass(frozen=True)
class NoWeightDecay(Transform):
    """Put parameters with fewer than two dimensions into a parameter group with `weight_decay` 0.

    These are biases and the scales and shifts of normalization layers: an optimizer sees dimensions, not modules.

    Source: He et al., "Bag of Tricks for Image Classification", 2019, arXiv:1812.01187, section 3.1; timm and
    ffcv-imagenet do the same.

    Example::

        >>> factory = NoWeightDecay().optimizer(lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=5e-4))
        >>> [group["weight_decay"] for group in factory(model.parameters()).param_groups]
        [0.0005, 0.0]
    """

    kind = "optimizer"
    source = "He et al. 2019, arXiv:1812.01187"

    def optimizer(self, factory: OptimizerFactory) -> OptimizerFactory:
        """Return a factory that splits the parameter groups; it can be pickled if `factory` can.

        It accepts what torch's optimizers accept: parameters, `(name, parameter)` pairs, or groups of either, whose
        other options are kept. It raises `PlanError` if FSDP1 has flattened a parameter and so lost its dimensions;
        `note_shape` before wrapping, with use_orig_params=True, preserves them.
        """
        return SplitDecay(factory)


@dataclass(frozen=True)
class SplitDecay:
    factory: OptimizerFactory

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        given = list(parameters)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        return self.factory([part for group in groups for part in _split(group)])


def _split(group: dict[str, Any]) -> list[dict[str, Any]]:
    members = group["params"]
    members = [members] if isinstance(members, Tensor) else list(members)
    parts: tuple[list[Any], list[Any]] = [], []
    for member in members:
        parts[_dimensions(member) < 2].append(member)
    decayed, free = ({**group, "params": part} for part in parts)
    free["weight_decay"] = 0.0
    return [part for part in (decayed, free) if part["params"]]


def note_shape(parameter: torch.nn.Parameter) -> None:
    """Store the dimensions of a parameter that FSDP1 is about to flatten, as an attribute of it."""
    parameter.drivetrain_dimensions = parameter.dim()  # type: ignore[attr-defined]


def _dimensions(member: Any) -> int:
    parameter = member[1] if isinstance(member, tuple) else member
    noted: int | None = getattr(parameter, "drivetrain_dimensions", None)
    if noted is not None:
        return noted
    # With use_orig_params=True each one is a slice of the flat parameter.
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        raise PlanError(
            "NoWeightDecay: FSDP1 has flattened the parameters, so biases and weights look the same. Call "
            "drivetrain.transforms.no_weight_decay.note_shape(parameter) on each before wrapping with "
            "use_orig_params=True, or use FSDP2 (fully_shard)."
        )
    # DeepSpeed stage 3 leaves an empty tensor in place of a parameter, with its true shape in an attribute.
    return len(getattr(parameter, "ds_shape", parameter.shape))
