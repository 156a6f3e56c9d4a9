"""The walk that the surgeries share: look at every module once, judge it, change it, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto

from torch import nn

from ...errors import PlanError
from ..base import Report, State, warn_nothing_changed


class Verdict(Enum):
    """What a surgery thinks of a module. The fourth verdict is a text: why a candidate is left alone."""

    IGNORE = auto()
    CHANGE = auto()
    DONE = auto()
    """It was changed before."""


def operate(
    name: str,
    model: nn.Module,
    judge: Callable[[nn.Module], Verdict | str],
    change: Callable[[nn.Module], None],
    looks_for: str,
) -> Report:
    """Changes every module of `model` that `judge` wants changed. Call it directly from `apply`.

    All are judged before any is changed, so a module that `change` adds is not judged.

    Args:
        name: class name of the transform.
        judge: the verdict on a module, or the reason to leave a candidate as it is.
        change: changes one module in place.
        looks_for: what the transform can change, completing "it looks for …" in the warning that nothing
            was found.

    Raises:
        PlanError: if the model is wrapped in DDP or sharded, before anything is changed.
    """
    _refuse_wrapped(name, model)
    verdicts = [(place, module, judge(module)) for place, module in model.named_modules()]
    changed: list[str] = []
    for place, module, verdict in verdicts:
        if verdict is Verdict.CHANGE:
            change(module)
            changed.append(place)
    skipped = tuple((place, verdict) for place, _, verdict in verdicts if isinstance(verdict, str))
    already = sum(verdict is Verdict.DONE for _, _, verdict in verdicts)
    notes = (f"{already} module(s) were changed before and stay as they are.",) if already else ()
    report = Report(name, tuple(changed), skipped, notes)
    if not changed and not already:
        warn_nothing_changed(report, looks_for, model, stacklevel=4)
    return report


def _refuse_wrapped(name: str, model: nn.Module) -> None:
    """New parameters would not be synchronised, silently, and sharded ones are not whole."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise PlanError(f"{name}: the model is wrapped in DDP already. Apply it before, to the model itself.")
    for place, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):  # a DTensor; importing its class takes a distributed build
            raise PlanError(f"{name}: {place!r} is sharded already (DTensor). Apply it before sharding.")


def obstacle(module: nn.Module, plain: type[nn.Module]) -> str | None:
    """Why the class of an instance of `plain` cannot be changed without changing what it does, or None."""
    if type(module) is not plain:
        return f"{type(module).__name__} is a subclass of {plain.__name__} and may have its own forward"
    return patched(module)


def patched(module: nn.Module) -> str | None:
    """Why a new class would not reach the module's forward, or None."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance, which a new class cannot reach"
    return None


def full_name(module: nn.Module) -> str:
    """Where the module's class is defined: recognises classes of packages that may not be installed."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def places(model: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> Iterator[str]:
    """The prefix, "" or one that ends in ".", of the state dict entries of each module of a kind.

    A module registered under two names comes twice, as in a state dict.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            yield f"{name}." if name else ""


def rename(state: State, old: str, new: str) -> None:
    """Renames an entry of `state`, in place, if there is one."""
    if old in state:
        state[new] = state.pop(old)


__all__ = ["Verdict", "full_name", "obstacle", "operate", "patched", "places", "rename"]
