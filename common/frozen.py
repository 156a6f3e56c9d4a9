"""An immutable mapping, for values in which a dict would be shared."""

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any


class FrozenDict(Mapping[str, Any]):
    """A mapping: comparable, hashable and picklable (`types.MappingProxyType` is not). Dicts, lists, tuples and sets in
    it are copied on construction and access, so changing them does not change it."""

    __slots__ = ("_items",)
    _items: dict[str, Any]

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "_items", {name: _copied(value) for name, value in (items or {}).items()})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a FrozenDict does not change; {name} cannot be set")

    def __getitem__(self, name: str) -> Any:
        return _copied(self._items[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self._items.keys() == other.keys() and all(_same(self[name], other[name]) for name in self)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))  # names only: values may be unhashable

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._items,)


def _copied(value: Any) -> Any:
    kind: Any = type(value)
    if kind is dict:
        return {name: _copied(each) for name, each in value.items()}
    if kind in (list, tuple):
        return kind(_copied(each) for each in value)
    return set(value) if kind is set else value


def _settings(metric: Any) -> Any:
    """Return what distinguishes a metric of torchmetrics from others of its class, whatever it was updated with."""
    fresh = copy.deepcopy(metric)
    fresh.reset()
    return fresh.__getstate__()


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, also for arrays and tensors, whose `==` is elementwise, and for metrics of
    torchmetrics, whose `==` is a metric."""
    if one is other:
        return True
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")  # if not imported, nothing is theirs
    if torch is not None and (isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.device == other.device and torch.equal(one, other)
    if numpy is not None and (isinstance(one, numpy.ndarray) or isinstance(other, numpy.ndarray)):
        return bool(numpy.array_equal(one, other))
    metrics = sys.modules.get("torchmetrics")
    if metrics is not None and isinstance(one, metrics.Metric) | isinstance(other, metrics.Metric):
        return type(one) is type(other) and _same(_settings(one), _settings(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if type(one) is type(other) and isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
