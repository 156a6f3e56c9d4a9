"""Averages of a model's parameters and buffers over a training: what EMA, SWA and Lookahead have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import PlanError
from ..base import Session
from .tensors import is_dtensor, locals_of


class Averages:
    """One average for each parameter and buffer of a model, kept beside it, on its device.

    Floating-point tensors are averaged, those in half precision in float32: a share of 0.001 of a bfloat16
    weight is below its rounding and would be lost. Counters (`num_batches_tracked`) and buffers with
    infinities, such as attention masks, are copied. A DTensor (FSDP2) is averaged shard by shard, without
    communication.

    The model is only written to in place, so compiled code, wrappers and optimizers keep their tensors.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, averaged: list[str] | None = None) -> None:
        """Starts from the model's present values.

        Args:
            model: whose tensors are averaged.
            averaged: `averaged_names(model)`, for a start in a step, which must not wait for the device.

        Raises:
            PlanError: under DeepSpeed's stage 3.
        """
        refuse_partitioned(model)
        self._averaged = averaged_names(model) if averaged is None else averaged
        self._sharded = _sharded(model)
        self._owners = dict(_owners(model))
        values = self._values()
        self._averages = {name: _copy(value) for name, value in values.items()}
        kept = set(self._averaged)
        self._moved = _groups({name: self._averages[name] for name in self._averaged})
        self._copied = _groups({name: value for name, value in self._averages.items() if name not in kept})
        self._all = _groups(values)

    @torch.no_grad()
    def add(self, share: float) -> None:
        """average = (1 - share) · average + share · value, and copies of what is not averaged."""
        values = self._values()
        for names in self._moved:
            averages = [self._averages[name] for name in names]
            news = [values[name].to(average.dtype) for name, average in zip(names, averages, strict=True)]
            torch._foreach_lerp_(locals_of(averages), locals_of(news), share)
        for names in self._copied:
            _copy_all([self._averages[name] for name in names], [values[name] for name in names])

    def install(self) -> None:
        """Writes the averages into the model, in place."""
        self._write(self._averages)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The averages are in the model inside it; its own values come back after, bit for bit."""
        own = {name: value.detach().clone() for name, value in self._values().items()}
        self.install()
        try:
            yield
        finally:
            self._write(own)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages by parameter name; DTensors for what is sharded. Not copied."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes averages from `state_dict`; a whole tensor is divided where the model is sharded.

        Raises:
            PlanError: if the names or shapes are not the model's.
        """
        if set(state) != set(self._averages):
            odd = sorted(set(state) ^ set(self._averages))
            raise PlanError(
                f"The averages were kept of another model: {odd[0]!r} (and {len(odd) - 1} more names) is in "
                "only one of the two; load them into the model they were kept of."
            )
        for name, average in self._averages.items():
            value = state[name]
            if value.shape != average.shape:
                raise PlanError(
                    f"The average of {name!r} has the shape {tuple(value.shape)}, the model's has "
                    f"{tuple(average.shape)}; load it into the model it was kept of."
                )
            if is_dtensor(average) and not is_dtensor(value):
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value.to(average.device), average.device_mesh, average.placements)
            average.copy_(value)

    @torch.no_grad()
    def _write(self, values: dict[str, torch.Tensor]) -> None:
        own = self._values()
        for names in self._all:
            _copy_all([own[name] for name in names], [values[name] for name in names])

    def _values(self) -> dict[str, torch.Tensor]:
        """The model's tensors. Looked up each time: `Module.to` puts new buffers in the old ones' place."""
        for module in self._sharded:
            # After an evaluation FSDP2 keeps the root's parameters whole, and would compute with that copy on.
            module.reshard()
        return {name: getattr(module, leaf).detach() for name, (module, leaf) in self._owners.items()}


class AveragedSession(Session):
    """A training's averages that move every so many steps, and are what is evaluated: EMA's and Lookahead's.

    Args:
        model: on its device, sharded and loaded; the averages begin with its weights.
        every: optimizer steps between two moves.
        move: moves the averages, at a share of the training (0 to 1).
    """

    def __init__(self, model: nn.Module, every: int, move: Callable[[Averages, float], None]) -> None:
        self._averages = Averages(model)
        self._every, self._move = every, move
        self._steps = 0

    def after_step(self, progress: float) -> None:
        """Counts the step, and moves the averages where they are due."""
        self._steps += 1
        if self._steps % self._every == 0:
            self._move(self._averages, progress)

    def evaluating(self) -> AbstractContextManager[None]:
        """The model has the averages inside it."""
        return self._averages.installed()

    def finish(self) -> None:
        """The model keeps the averages."""
        self._averages.install()

    def state_dict(self) -> dict[str, Any]:
        """`{"steps": int, "averages": {name: tensor}}`."""
        return {"steps": self._steps, "averages": self._averages.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave, of the same model."""
        self._averages.load_state_dict(state["averages"])
        self._steps = state["steps"]


def refuse_partitioned(model: nn.Module) -> None:
    """Raises a `PlanError` if DeepSpeed's stage 3 has put empty tensors in the place of the parameters."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_shape"):
            raise PlanError(
                f"The average of {name!r} cannot be kept: DeepSpeed's stage 3 has divided it among the ranks "
                "and left an empty tensor; use fsdp2, or leave EMA and SWA out."
            )


@torch.no_grad()
def averaged_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that are averaged; the others are copied.

    Reads the model's buffers from the device, once.
    """
    numbers = {name: value for name, value in model.named_buffers() if value.is_floating_point()}
    finite = [value.isfinite().all() for value in numbers.values()]
    read = torch.stack([one.to(finite[0].device) for one in finite]).tolist() if finite else []
    kept = {name for name, whole in zip(numbers, read, strict=True) if whole}
    kept |= {name for name, value in model.named_parameters() if value.is_floating_point()}
    return [name for name, _ in _owners(model) if name in kept]


def _owners(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """(name, (module, attribute)) of every parameter and buffer, tied ones once, by their first name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for named in (model.named_parameters(), model.named_buffers()):
        for name, _ in named:
            path, _, leaf = name.rpartition(".")
            yield name, (modules[path], leaf)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """A copy of its own, in float32 where the value is in half precision."""
    if value.is_floating_point():
        return value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
    return value.clone()


def _groups(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return the names in groups of one device and dtype, of which one kernel can take all."""
    found: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault((tensor.device, tensor.dtype), []).append(name)
    return list(found.values())


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Overwrite `targets`, of one device and dtype, by `sources`, shard by shard; one launch for many tensors."""
    torch._foreach_copy_(locals_of(targets), locals_of(sources))


def _sharded(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 gathers and frees."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


__all__ = ["AveragedSession", "Averages", "averaged_names", "refuse_partitioned"]
