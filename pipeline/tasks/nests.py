"""Outputs of models, and targets with further fields: nests of tuples, lists and dicts with tensors in them."""

from collections.abc import Callable, Mapping, Sequence
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


def pair(batch: Sequence[Any]) -> tuple[Any, Any]:
    """Return a loader's batch as images and targets: the labels; with `load(fields=…)` a tuple of them and each field,
    a tensor or a list."""
    images, *targets = batch
    return images, targets[0] if len(targets) == 1 else tuple(targets)


def labels_of(targets: Any) -> Any:
    return targets[0] if isinstance(targets, tuple) else targets


def select_samples(targets: Any, samples: slice) -> Any:
    return tuple(each[samples] for each in targets) if isinstance(targets, tuple) else targets[samples]


def join_samples(parts: Sequence[Any]) -> Any:
    """Return images or targets of several microbatches as those of one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, tuple):
        return tuple(map(join_samples, zip(*parts, strict=True)))
    return [each for part in parts for each in part] if isinstance(first, list) else torch.cat([*parts])
