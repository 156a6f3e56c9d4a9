"""A choice of a model's modules: its blocks, those of some classes, or those that a function picks."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from ...errors import StrategyError, suggest
from .blocks import find_blocks

Policy = bool | Collection[str] | Callable[[str, nn.Module], bool]
"""Which modules: True for the model's blocks (see `blocks.find_blocks`), class names such as `["Bottleneck"]`,
or a function of a module's name and the module; False for none."""


def check_policy(policy: Policy, place: str) -> None:
    """Raises StrategyError for what is no policy, such as a string, whose letters would be taken for names; `place`
    is where it was given."""
    given: object = policy
    if isinstance(given, str) or not (isinstance(given, bool | Collection) or callable(given)):
        raise StrategyError(
            f"{place}={policy!r} must be a list of class names, True for the model's blocks, or a function of "
            f"name and module."
        )


def choose(policy: Policy, model: nn.Module, place: str) -> dict[str, nn.Module]:
    """The modules that `policy` chooses, by name, those that hold others before these; none for False.

    Raises:
        StrategyError: if it chooses none; `place` is where it was given.
    """
    if policy is False:
        return {}
    chooses = _chooses(policy, model)
    chosen = {name: module for name, module in model.named_modules() if chooses(name, module)}
    if not chosen:
        raise StrategyError(_nothing_chosen(policy, model, place))
    return chosen


def _chooses(policy: Policy, model: nn.Module) -> Callable[[str, nn.Module], bool]:
    if isinstance(policy, bool):
        blocks = set(find_blocks(model))
        return lambda _, module: module in blocks
    if callable(policy):
        return policy
    names = set(policy)
    return lambda _, module: type(module).__name__ in names


def _nothing_chosen(policy: Policy, model: nn.Module, place: str) -> str:
    kinds = {type(module).__name__ for module in model.modules() if any(module.children())}
    if isinstance(policy, bool):
        return (
            f"{place}=True found no repeated blocks in {type(model).__name__}; name the classes of the modules "
            f"instead, such as {sorted(kinds)[:3]}."
        )
    names = [] if callable(policy) else sorted(policy)
    what = str(names) if names else "the function"
    hint = suggest(names[0] if names else "", kinds)
    return f"{place}: {what} chooses no module of the model.{hint}"
