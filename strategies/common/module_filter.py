"""Select modules of a model: its blocks, those of some classes, or those that a function selects."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from ...common.errors import StrategyError, suggest
from .blocks import find_blocks

ModuleFilter = bool | Collection[str] | Callable[[str, nn.Module], bool]
"""Which modules: True for the model's blocks (see `blocks.find_blocks`), class names such as `["Bottleneck"]`, or a
function of a module's name and the module; False for none."""


def check_filter(module_filter: ModuleFilter, place: str) -> None:
    """Raise `StrategyError` for an invalid filter, such as a string, whose letters would count as names; `place` names
    the option."""
    given: object = module_filter
    if isinstance(given, str) or not (isinstance(given, bool | Collection) or callable(given)):
        raise StrategyError(
            f"{place}={module_filter!r} must be a list of class names, True for the model's blocks, or a function of "
            f"name and module."
        )


def choose(module_filter: ModuleFilter, model: nn.Module, place: str) -> dict[str, nn.Module]:
    """Return the modules that `module_filter` selects, by name, outer ones before inner ones; none for False. Raise
    `StrategyError` if it selects none; `place` names the option."""
    if module_filter is False:
        return {}
    selects = _predicate(module_filter, model)
    chosen = {name: module for name, module in model.named_modules() if selects(name, module)}
    if not chosen:
        raise StrategyError(_nothing_chosen(module_filter, model, place))
    return chosen


def _predicate(module_filter: ModuleFilter, model: nn.Module) -> Callable[[str, nn.Module], bool]:
    if isinstance(module_filter, bool):
        blocks = set(find_blocks(model))
        return lambda _, module: module in blocks
    if callable(module_filter):
        return module_filter
    names = set(module_filter)
    return lambda _, module: type(module).__name__ in names


def _nothing_chosen(module_filter: ModuleFilter, model: nn.Module, place: str) -> str:
    kinds = {type(module).__name__ for module in model.modules() if any(module.children())}
    if isinstance(module_filter, bool):
        return (
            f"{place}=True found no repeated blocks in {type(model).__name__}. Pass the classes of the modules "
            f"instead, such as {sorted(kinds)[:3]}."
        )
    names = [] if callable(module_filter) else sorted(module_filter)
    what = str(names) if names else "the function"
    hint = suggest(names[0] if names else "", kinds)
    return f"{place}: {what} selects no module of the model.{hint}"
