"""Activation checkpointing: a module keeps only its input for the backward, which runs its forward once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .module_filter import Policy, choose


def recompute_activations(model: nn.Module, policy: Policy) -> tuple[str, ...]:
    """Has the modules that `policy` chooses forget their activations; returns their names.

    Numbers stay the same: the second forward draws the random numbers of the first and sees its buffers, and
    these (BatchNorm's statistics) are updated once; `torch.utils.checkpoint` alone sees to the first only. Only a
    module's class changes, to a subclass: no name in the state dict does. Of chosen modules inside each other the
    outermost counts. About a third more computing, for memory of one activation a module (Chen et al. 2016,
    "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174).

    Raises:
        StrategyError: if it chooses nothing.
    """
    outermost: dict[str, nn.Module] = {}
    for name, module in choose(policy, model, "activation_checkpointing").items():
        if not any(name.startswith(f"{outer}.") or outer == "" for outer in outermost):
            outermost[name] = module
    for module in outermost.values():
        if not isinstance(module, _Recomputed):
            module.__class__ = _recomputed(type(module))
    return tuple(outermost)


class _Recomputed(nn.Module):
    """Mixed into the class of a module, before it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes operations, and updates buffers once
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = partial(_contexts, self)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """One subclass for each class, so that modules of a class stay of one class."""
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Recomputed{kind.__name__}", (_Recomputed, kind), {"__module__": __name__})
    return _KINDS[kind]


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What the first forward runs in, and the second."""
    return nullcontext(), _buffers_as_in_the_first(module, _values(module))


@contextmanager
def _buffers_as_in_the_first(module: nn.Module, first: list[torch.Tensor]) -> Iterator[None]:
    now = _values(module)
    _write(module, first)
    try:
        yield
    finally:
        _write(module, now)


def _values(module: nn.Module) -> list[torch.Tensor]:
    return [buffer.data.clone() for buffer in module.buffers()]


def _write(module: nn.Module, values: list[torch.Tensor]) -> None:
    for buffer, value in zip(module.buffers(), values, strict=True):
        # Through `data`, which autograd does not watch: the backward about to run may have saved the buffer.
        buffer.data.copy_(value)
