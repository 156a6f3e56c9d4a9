"""Models on the meta device, which have shapes but no values: what gives them these."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...common.errors import StrategyError
from ...common.model_state import has_mean

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_left_to_caller: ContextVar[dict[str, str] | None] = ContextVar("left_to_caller", default=None)


@contextmanager
def values_follow() -> Iterator[dict[str, str]]:
    """Inside the block, strategies accept tensors on the meta device that no `reset_parameters` initializes: the caller
    loads them next, or raises what `without_reset` returns, and for modules that have the method, this dict of the
    same form, which the block fills."""
    unwritten: dict[str, str] = {}
    token = _left_to_caller.set(unwritten)
    try:
        yield unwritten
    finally:
        _left_to_caller.reset(token)


def without_reset(model: nn.Module) -> dict[str, str]:
    """Return the names of the meta tensors that nothing initializes, and what to say of each."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        waiting = [own for own, _ in _meta_tensors(module)]
        if waiting and _reset_of(module) is None:
            found |= _reasons(name, module, waiting, "and has no reset_parameters() to initialize", "that method")
    return found


def _reasons(name: str, module: nn.Module, own: list[str], why: str, remedy: str) -> dict[str, str]:
    reason = (
        f"{name or 'the model'}, a {type(module).__name__}, is on the meta device {why} {', '.join(own)}. Add "
        f"{remedy}, begin with weights that have them, or build the model on the CPU."
    )
    return {f"{name}.{each}" if name else each: reason for each in own}


def refuse_without_reset(strategy: str, model: nn.Module) -> None:
    if _left_to_caller.get() is None:
        for reason in without_reset(model).values():
            raise StrategyError(f"strategy {strategy!r}: {reason}")


def materialise_units(model: nn.Module, units: Iterable[nn.Module], device: torch.device) -> None:
    """Do for each unit, then for the rest, what `materialise` does: in the order in which they are sharded, so that a
    seed gives the same values for any number of ranks."""
    done: set[nn.Module] = set()
    for unit in (*units, model):
        materialise(model, device, done, unit=unit)
        done.update(unit.modules())


def materialise(
    model: nn.Module, device: torch.device, done: Collection[nn.Module] = (), *,
    unit: nn.Module | None = None, reset: bool = True,
) -> None:  # fmt: skip
    """Replace the meta tensors of `unit`, a module in `model` (default: all of it), by real ones on `device`, with the
    values of `reset_parameters`, and without that method or `reset`, with NaN or the lowest integer; skip the modules
    in `done`. Children come before parents, as in constructors. Tied parameters stay tied. Raise StrategyError for a
    tensor that `reset_parameters` leaves without a value, unless `values_follow`."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    due: dict[nn.Module, dict[str, tuple[torch.Tensor, int]]] = {}
    for module in _children_first(model if unit is None else unit, set(done)):
        waiting = _meta_tensors(module)
        for name, tensor in waiting:
            if tensor not in made:
                real = torch.empty_like(tensor, device=device).fill_(_placeholder(tensor.dtype))
                is_parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
            setattr(module, name, made[tensor])
        if waiting and reset and (fill := _reset_of(module)):
            due[module] = {name: (made[tensor], made[tensor]._version) for name, tensor in waiting}
            fill()
    for module, tensors in due.items():  # at the end: a parent may initialize what its children hold
        own = [name for name, before in tensors.items() if _unwritten(getattr(module, name, None), *before)]
        if not own:
            continue
        name = next(name for name, each in model.named_modules() if each is module)
        reasons = _reasons(name, module, own, "and its reset_parameters() does not initialize", "them there")
        if (unwritten := _left_to_caller.get()) is None:
            raise StrategyError(next(iter(reasons.values())))
        unwritten |= reasons


def _placeholder(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return dtype is torch.bool or torch.iinfo(dtype).min or torch.iinfo(dtype).max


@torch.no_grad()
def _unwritten(now: torch.Tensor | None, real: torch.Tensor, version: int) -> bool:
    if now is not real or not real.numel():
        return False
    if has_mean(real):
        return bool(real.isnan().all())
    # The placeholder may be a value of the model's; writing it counts, but not through `data`.
    return real._version == version and bool((real == _placeholder(real.dtype)).all())


def fake_tensors(model: nn.Module, mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Return the model's parameters and buffers as tensors of `mode`, without memory; those on the meta device as if on
    the CPU, where other tensors of a forward are."""

    def fake(own: torch.Tensor) -> torch.Tensor:
        if own.is_meta:
            return torch.empty_like(own, device="cpu").requires_grad_(own.requires_grad)
        return mode.from_tensor(own)

    with mode:
        return {name: fake(each) for name, each in chain(model.named_parameters(), model.named_buffers())}


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _meta_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [(name, tensor) for name, tensor in own if tensor.is_meta]


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    private = module._reset_parameters if isinstance(module, nn.MultiheadAttention) else None
    return getattr(module, "reset_parameters", private)
