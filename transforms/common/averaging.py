"""Averages of a model's parameters and buffers during training: shared by EMA, SWA and Lookahead."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import PlanError
from ...common.model_state import has_mean, unlisted_tensors
from ...common.rows import chunk, is_dtensor, local_part, shard_of
from ...common.storage.tensors import Tensors, rows_of, shape_of
from ..base import Session
from .tensors import locals_of


class Averages:
    """An average for each parameter and buffer of a model, on the same device; half precision in float32, because an
    update of 0.001 times a bfloat16 weight would be lost to rounding. Counters (`num_batches_tracked`) and buffers with
    infinities, such as attention masks, are copied. A DTensor (FSDP2) is averaged shard by shard. The model is only
    written in place, so compiled code, wrappers and optimizers keep their tensors."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, averaged: list[str] | None = None) -> None:
        """Start from the model's values. `averaged`, from `averaged_names(model)`, saves a synchronization here."""
        refuse_partitioned(model)
        self._averaged = averaged_names(model) if averaged is None else averaged
        self._sharded = _sharded(model)
        self._owners = dict(_owners(model))
        self._loose = [name for name in unlisted_tensors(model) if name in self._owners]
        values = self._values()
        self._averages = {name: _copy(value) for name, value in values.items()}
        kept = set(self._averaged)
        self._moved = _groups({name: self._averages[name] for name in self._averaged})
        self._copied = _groups({name: value for name, value in self._averages.items() if name not in kept})
        self._all = _groups(values)

    @torch.no_grad()
    def add(self, share: float) -> None:
        """Update each average to (1 - share) · average + share · value, and copy what is not averaged."""
        values = self._values()
        for name in self._loose:  # a forward may have replaced a buffer by one of another shape: begin again
            if values[name].shape != self._averages[name].shape:
                self._averages[name] = _copy(values[name])
        for names in self._moved:
            averages = [self._averages[name] for name in names]
            news = [values[name].to(average.dtype) for name, average in zip(names, averages, strict=True)]
            torch._foreach_lerp_(locals_of(averages), locals_of(news), share)
        for names in self._copied:
            _copy_all([self._averages[name] for name in names], [values[name] for name in names])

    def _leave_out(self, names: set[str]) -> None:
        for name in names:
            del self._averages[name], self._owners[name]
            self._loose.remove(name)
        for groups in (self._moved, self._copied, self._all):
            groups[:] = [[name for name in group if name not in names] for group in groups]
            groups[:] = [group for group in groups if group]

    def install(self) -> None:
        self._write(self._averages)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In this context the model holds the averages; exit restores its own values exactly."""
        own = {name: value.detach().clone() for name, value in self._values().items()}
        self.install()
        try:
            yield
        finally:
            self._write(own)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by parameter name; DTensors if sharded. Not copied."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load averages from a `state_dict`; full tensors are sharded if the model is."""
        odd = sorted((set(state) ^ set(self._averages)) - (set(self._loose) - set(state)))
        if odd:
            raise PlanError(
                f"These averages belong to another model: {odd[0]!r} (and {len(odd) - 1} more names) exists in "
                "only one of the two. Load them into the model they were computed for."
            )
        self._leave_out(set(self._averages) - set(state))
        for name, average in self._averages.items():
            shape = shape_of(state, name)
            if name in self._loose and shape != average.shape:
                self._averages[name] = state[name].to(average.device)
                continue
            if shape != average.shape:
                raise PlanError(
                    f"The average of {name!r} has shape {shape}, but the model's tensor has {tuple(average.shape)}. "
                    "Load it into the model it was computed for."
                )
            _load(average, state, name)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        own = self._values()
        grown = {name for name in self._loose if own[name].shape != values[name].shape}
        for names in self._all:
            fitting = [name for name in names if name not in grown]
            _copy_all([own[name] for name in fitting], [values[name] for name in fitting])

    def _values(self) -> dict[str, Tensor]:
        """Return the model's tensors, looked up on each call because `Module.to` replaces buffers."""
        for module in self._sharded:
            # After an evaluation FSDP2 keeps the root's parameters gathered and would keep using that copy.
            module.reshard()
        return {name: getattr(module, leaf).detach() for name, (module, leaf) in self._owners.items()}


class AveragedSession(Session):
    """Averages for evaluation (EMA, Lookahead): `move` updates them every `every` steps; it receives the progress."""

    def __init__(self, model: nn.Module, every: int, move: Callable[[Averages, float], None]) -> None:
        self._averages, self._every, self._move = Averages(model), every, move
        self._steps = 0

    def after_step(self, progress: float) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self._move(self._averages, progress)

    def evaluating(self) -> AbstractContextManager[None]:
        return self._averages.installed()

    def finish(self) -> None:
        self._averages.install()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "averages": self._averages.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages.load_state_dict(state["averages"])
        self._steps = state["steps"]


def refuse_partitioned(model: nn.Module) -> None:
    """Raise `PlanError` if DeepSpeed stage 3 has replaced the parameters by empty tensors."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_shape"):
            raise PlanError(
                f"Cannot average {name!r}: DeepSpeed stage 3 has partitioned it across the ranks and left an empty "
                "tensor. Use the strategy fsdp, or remove EMA and SWA."
            )


@torch.no_grad()
def averaged_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that are averaged; reads the buffers from the device once."""
    numbers = {name: value for name, value in model.named_buffers() if has_mean(value)}
    finite = [value.isfinite().all() for value in numbers.values()]
    read = torch.stack([one.to(finite[0].device) for one in finite]).tolist() if finite else []
    kept = {name for name, whole in zip(numbers, read, strict=True) if whole}
    kept |= {name for name, value in model.named_parameters() if has_mean(value)}
    return [name for name, _ in _owners(model) if name in kept]


def _owners(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield (name, (module, attribute)) of every parameter and buffer; tied ones once, under their first name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for named in (model.named_parameters(), model.named_buffers()):
        for name, _ in named:
            path, _, leaf = name.rpartition(".")
            yield name, (modules[path], leaf)


def _copy(value: Tensor) -> Tensor:
    if has_mean(value):
        return value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
    return value.clone()


def _load(average: Tensor, state: Mapping[str, Any], name: str) -> None:
    """Copy a tensor of `state`, full or a DTensor, into `average`, of which each rank may hold some rows."""
    own = shard_of(average)
    if own is not None and (isinstance(state, Tensors) or not is_dtensor(state[name])):
        local_part(average).copy_(rows_of(state, name, *chunk(average.shape[0], *own)))
        return
    value = state[name]
    if is_dtensor(average) and not is_dtensor(value):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(average.device), average.device_mesh, average.placements)
    average.copy_(value)


def _groups(tensors: dict[str, Tensor]) -> list[list[str]]:
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(name)
    return list(groups.values())


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(locals_of(targets), locals_of(sources))


def _sharded(model: nn.Module) -> list[Any]:
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
