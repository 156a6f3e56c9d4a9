"""Models on the meta device, which have shapes but no values: what gives them these."""

from __future__ import annotations

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

_left_to_caller: ContextVar[bool] = ContextVar("left_to_caller", default=False)


@contextmanager
def values_follow() -> Iterator[None]:
    """Inside the block, strategies accept modules on the meta device without `reset_parameters`, and fill their tensors
    with NaN: the caller loads them next, or raises what `without_reset` says."""
    token = _left_to_caller.set(True)
    try:
        yield
    finally:
        _left_to_caller.reset(token)


def without_reset(model: nn.Module) -> dict[str, str]:
    """Return the names of the meta tensors that nothing initializes, and what to say of each."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        waiting = [own for own, _ in _meta_tensors(module)]
        if waiting and _reset_of(module) is None:
            reason = (
                f"{name or 'the model'}, a {type(module).__name__}, is on the meta device and has no "
                f"reset_parameters() to initialize {', '.join(waiting)}. Add that method, begin with weights that have "
                "them, or build the model on the CPU."
            )
            found |= {f"{name}.{own}" if name else own: reason for own in waiting}
    return found


def refuse_without_reset(strategy: str, model: nn.Module) -> None:
    if not _left_to_caller.get():
        for reason in without_reset(model).values():
            raise StrategyError(f"strategy {strategy!r}: {reason}")


def materialise_units(model: nn.Module, units: Iterable[nn.Module], device: torch.device) -> None:
    """Do for each unit, then for the rest, what `materialise` does: in the order in which they are sharded, so that a
    seed gives the same values for any number of ranks."""
    done: set[nn.Module] = set()
    for unit in (*units, model):
        materialise(unit, device, done)
        done.update(unit.modules())


def materialise(
    model: nn.Module, device: torch.device, done: Collection[nn.Module] = (), *, reset: bool = True
) -> None:
    """Replace the meta tensors of `model` by real ones on `device`, with the values of `reset_parameters`, or NaN where
    there is none, and without `reset`; skip the modules in `done`. Children come before parents, as in constructors.
    Tied parameters stay tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in _children_first(model, set(done)):
        waiting = _meta_tensors(module)
        for name, tensor in waiting:
            if tensor not in made:
                real = torch.empty_like(tensor, device=device)
                real.fill_(float("nan") if has_mean(real) else 0)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
            setattr(module, name, made[tensor])
        if waiting and reset and (fill := _reset_of(module)):
            fill()


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
