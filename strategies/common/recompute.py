"""Activation checkpointing: a module keeps only its input for the backward, which runs its forward again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...common.model_state import BufferCopies
from .module_filter import ModuleFilter, choose


def recompute_activations(model: nn.Module, module_filter: ModuleFilter) -> tuple[str, ...]:
    """Checkpoint the activations of the modules that `module_filter` selects; return their names.

    Results do not change: the second forward uses the random numbers and buffers of the first, and buffers (BatchNorm's
    statistics) are updated once; `torch.utils.checkpoint` only does the former. Only a module's class changes, to a
    subclass, and no name in the state dict. Of nested modules, only the outermost counts. It takes about a third more
    computation, for the memory of one activation per module (Chen et al. 2016, "Training Deep Nets with Sublinear
    Memory Cost", arXiv:1604.06174).
    """
    outermost: dict[str, nn.Module] = {}
    for name, module in choose(module_filter, model, "activation_checkpointing").items():
        if not any(name.startswith(f"{outer}.") or outer == "" for outer in outermost):
            outermost[name] = module
    for module in outermost.values():
        if not isinstance(module, _Recomputed):
            module.__class__ = _recomputed(type(module))  # type: ignore[arg-type]
    return tuple(outermost)


class _Recomputed(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes operations, and updates buffers once
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        contexts = partial(_contexts, self)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@cache  # modules of one class keep a common class
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Recomputed{kind.__name__}", (_Recomputed, kind), {"__module__": __name__})


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _buffers_as_in_the_first(module, BufferCopies(module))


@contextmanager
def _buffers_as_in_the_first(module: nn.Module, first: BufferCopies) -> Iterator[None]:
    now = BufferCopies(module)
    first.restore()
    try:
        yield
    finally:
        now.restore()
