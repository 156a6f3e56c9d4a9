"""Outputs of models and tasks: nests of tuples, lists and dicts with tensors in them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """Apply `function` to each tensor. Mappings become dicts; tuples, named tuples and lists keep their type."""
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        return {name: map_tensors(function, value) for name, value in nest.items()}
    if isinstance(nest, list | tuple):
        values = [map_tensors(function, value) for value in nest]
        return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
    return nest


def to_float(outputs: Any) -> Any:
    """Floating-point tensors only."""
    return map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, outputs)
