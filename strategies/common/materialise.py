"""Give models built on the meta device (shapes without values) their values, a few modules at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from ...common.errors import StrategyError


def refuse_without_reset(strategy: str, model: nn.Module) -> None:
    """Raise `StrategyError`, naming the module, if one has meta tensors but no way to initialise them."""
    for name, module in model.named_modules():
        waiting = [own for own, _ in _meta_tensors(module)]
        if waiting and _reset_of(module) is None:
            raise StrategyError(
                f"strategy {strategy!r}: {name or 'the model'}, a {type(module).__name__}, is on the meta device and "
                f"has no reset_parameters() to initialise {', '.join(waiting)}. Add that method, or build the "
                f"model on the CPU."
            )


def materialise(model: nn.Module, device: torch.device, done: Collection[nn.Module] = ()) -> None:
    """Replace the meta tensors of `model` by real ones on `device`, with the values of `reset_parameters`; skip the
    modules in `done`.

    Children come before parents, as in constructors. Tied parameters stay tied. Changes that the full model's
    constructor makes after its modules are built are not repeated.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in _children_first(model, set(done)):
        waiting = _meta_tensors(module)
        for name, tensor in waiting:
            if tensor not in made:
                real = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
            setattr(module, name, made[tensor])
        reset = _reset_of(module)
        if waiting and reset is not None:
            reset()


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
    """Return the module's `reset_parameters`; torch's MultiheadAttention has it under a private name."""
    reset = getattr(module, "reset_parameters", None)
    if reset is None and isinstance(module, nn.MultiheadAttention):
        reset = module._reset_parameters
    return reset
