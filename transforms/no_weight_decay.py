"""NoWeightDecay: weight decay for the weights, none for normalisation layers and biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import PlanError
from .base import Kind, OptimizerFactory, Transform


@dataclass(frozen=True)
class NoWeightDecay(Transform):
    """Gives the optimizer parameters of fewer than two dimensions in a group with `weight_decay` 0.

    Those are the scales and shifts of normalisation layers and all biases. They are told by their
    dimensions, since an optimizer sees no modules.

    Source: He et al., "Bag of Tricks for Image Classification", 2019, arXiv:1812.01187, section 3.1; so do
    timm and ffcv-imagenet.
    """

    kind: ClassVar[Kind] = "optimizer"
    source: ClassVar[str] = "He et al. 2019, arXiv:1812.01187"

    def optimizer(self, factory: OptimizerFactory) -> OptimizerFactory:
        """The factory with divided groups, which pickles whenever `factory` does.

        It takes what torch's optimizers take: parameters, `(name, parameter)` pairs, or groups of either,
        whose other options stay.

        Raises:
            PlanError: when called, if a parameter is many flattened into one (FSDP1), so that its
                dimensions say nothing.
        """
        return SplitDecay(factory)


@dataclass(frozen=True)
class SplitDecay:
    """`factory`, called with groups of parameters with and without weight decay."""

    factory: OptimizerFactory

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer over `parameters`, or groups of them."""
        given = list(parameters)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        return self.factory([part for group in groups for part in _split(group)])


def _split(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group in up to two: decayed, and not decayed."""
    members = group["params"]
    members = [members] if isinstance(members, torch.Tensor) else list(members)
    parts: tuple[list[Any], list[Any]] = [], []
    for member in members:
        parts[_dimensions(member) < 2].append(member)
    decayed, free = ({**group, "params": part} for part in parts)
    free["weight_decay"] = 0.0
    return [part for part in (decayed, free) if part["params"]]


def _dimensions(member: Any) -> int:
    parameter = member[1] if isinstance(member, tuple) else member
    if getattr(parameter, "_is_flat_param", False):
        raise PlanError(
            "NoWeightDecay: FSDP1 made one flat parameter of many, so that biases cannot be told from "
            "weights; wrap with use_orig_params=True, or distribute with fsdp2."
        )
    # DeepSpeed's stage 3 leaves an empty tensor in the place of a parameter, with its true shape beside it.
    return len(getattr(parameter, "ds_shape", parameter.shape))


__all__ = ["NoWeightDecay", "SplitDecay"]
