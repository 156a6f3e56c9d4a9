"""Which modules of a model are its blocks: the units that a sharding strategy gathers one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

LARGE = 1_000_000
"""Parameters from which a single layer, or a block inside a block, is worth a message of its own: below
4 MB in fp32 a message costs mostly its latency."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of `model`, inner ones before those that hold them; the model itself is not one.

    A block has children of its own, stands in a Sequential, ModuleList or ModuleDict or at the top of the model,
    and its class occurs there at least twice: the residual blocks of a ResNet, the encoder layers of a
    transformer. Inside a block, only blocks of `LARGE` parameters or more are looked for. Outside of them, a
    single layer of that size in a Sequential, such as VGG's first linear layer, is one too. A module that shares
    a parameter with one outside of it is left to whatever holds both.
    """
    found = _repeated(model)
    inside = {module for block in found for module in block.modules()}
    found += [layer for layer in _large_layers(model) if layer not in inside]
    return without_cut_ties(model, dict.fromkeys(found))


def without_cut_ties(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that share no parameter with a module outside of them: apart, it would become two."""
    tied = _holders_of_tied(model)
    return [module for module in modules if not _cuts_a_tie(module, tied)]


def _repeated(module: nn.Module) -> list[nn.Module]:
    """The composed modules below `module` whose class occurs at least twice, inner ones first."""
    candidates = list(_candidates(module))
    counts = Counter(type(candidate) for candidate in candidates)
    found: list[nn.Module] = []
    for candidate in candidates:
        inner = _repeated(candidate)
        if counts[type(candidate)] > 1:
            found += [*(block for block in inner if _size(block) >= LARGE), candidate]
        else:
            found += inner
    return found


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules below `module` that may be blocks, each once."""
    seen: set[nn.Module] = set()

    def walk(parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            if child in seen:
                continue
            seen.add(child)
            at_top = parent is module and not _is_list(child)
            if (_is_list(parent) or at_top) and any(child.children()) and not _is_stack(child):
                if _size(child):
                    yield child
            else:
                yield from walk(child)

    return walk(module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _is_stack(module: nn.Module) -> bool:
    """Whether it only holds modules that are themselves composed, as a ResNet's layer holds its blocks."""
    if not _is_list(module):
        return False
    if not isinstance(module, nn.Sequential):
        return True  # most have no forward before which to gather
    return any(any(child.children()) for child in module.children())


def _large_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Large layers in a Sequential: it is sure to call them, while others may only read their weights."""
    for parent in model.modules():
        if isinstance(parent, nn.Sequential):
            for child in parent.children():
                if not any(child.children()) and _size(child) >= LARGE:
                    yield child


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _holders_of_tied(model: nn.Module) -> list[set[nn.Module]]:
    """For each parameter that several modules hold, those modules."""
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    return [modules for modules in holders.values() if len(modules) > 1]


def _cuts_a_tie(block: nn.Module, tied: list[set[nn.Module]]) -> bool:
    """Whether a parameter is held both inside and outside of `block`."""
    inside = set(block.modules())
    return any(modules & inside and modules - inside for modules in tied)
