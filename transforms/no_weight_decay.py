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
            PlanError: when called, if FSDP1 has flattened a parameter, so that its dimensions say nothing;
                `note_shape` before wrapping, with use_orig_params=True, keeps them.
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


def note_shape(parameter: torch.nn.Parameter) -> None:
    """Keeps the dimensions of a parameter that FSDP1 is about to flatten, as an attribute of it."""
    parameter.drivetrain_dimensions = parameter.dim()  # type: ignore[attr-defined]


def _dimensions(member: Any) -> int:
    parameter = member[1] if isinstance(member, tuple) else member
    noted: int | None = getattr(parameter, "drivetrain_dimensions", None)
    if noted is not None:
        return noted
    # With use_orig_params=True each is a flat part of the flat parameter.
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        raise PlanError(
            "NoWeightDecay: FSDP1 has flattened the parameters, so that biases cannot be told from weights; call "
            "drivetrain.transforms.no_weight_decay.note_shape(parameter) on each before wrapping with "
            "use_orig_params=True, or use FSDP2 (fully_shard)."
        )
    # DeepSpeed's stage 3 leaves an empty tensor in the place of a parameter, with its true shape beside it.
    return len(getattr(parameter, "ds_shape", parameter.shape))


__all__ = ["NoWeightDecay", "SplitDecay", "note_shape"]
