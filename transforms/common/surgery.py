"""The walk all surgeries share: inspect every module once, change it, report."""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto

from torch import nn

from ...common.errors import PlanError
from ...common.model_state import forward_is_replaced
from ...common.rows import is_dtensor
from ..base import Report, State, warn_nothing_changed

Classes = Mapping[type[nn.Module] | str, type[nn.Module]]
"""What each class becomes. A class of a package that may not be installed is given by its `full_name`."""


class Verdict(Enum):
    """What a surgery does with a module. A fourth verdict is a string: why a candidate is skipped."""

    IGNORE, CHANGE, DONE = auto(), auto(), auto()


def operate(
    name: str,
    model: nn.Module,
    judge: Callable[[nn.Module], Verdict | str],
    change: Callable[[nn.Module], None],
    looks_for: str,
    *,
    wrapped: bool = False,
) -> Report:
    """Change every module that `judge` selects, in place; all are judged before any is changed. Call it directly from
    `apply`. A model wrapped in DDP or sharded is rejected, unless `wrapped`: its parameters stay."""
    if not wrapped:
        refuse_wrapped(name, model)
    verdicts = [(place, module, judge(module)) for place, module in model.named_modules()]
    changed: list[str] = []
    for place, module, verdict in verdicts:
        if verdict is Verdict.CHANGE:
            change(module)
            changed.append(place)
    skipped = tuple((place, verdict) for place, _, verdict in verdicts if isinstance(verdict, str))
    already = sum(verdict is Verdict.DONE for _, _, verdict in verdicts)
    notes = (f"{already} module(s) were already changed and are left as they are.",) if already else ()
    report = Report(name, tuple(changed), skipped, notes)
    if not changed and not already:
        warn_nothing_changed(report, looks_for, model, stacklevel=4)
    return report


def refuse_wrapped(name: str, model: nn.Module) -> None:
    """Raise `PlanError` if DDP would not synchronize new parameters, or if parameters are sharded."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise PlanError(f"{name}: the model is already wrapped in DDP. Apply the transform before wrapping it.")
    for place, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise PlanError(f"{name}: {place!r} is already sharded (DTensor). Apply the transform before sharding.")


def judge_class(module: nn.Module, classes: Classes) -> Verdict | str:
    if isinstance(module, tuple(classes.values())):
        return Verdict.DONE
    if _key(module, classes) is not None:
        return patched(module) or Verdict.CHANGE
    plain = next((kind for kind in classes if isinstance(kind, type) and isinstance(module, kind)), None)
    return Verdict.IGNORE if plain is None else obstacle(module, plain) or Verdict.CHANGE


def change_class(module: nn.Module, classes: Classes) -> None:
    key = _key(module, classes)
    assert key is not None
    module.__class__ = classes[key]


def _key(module: nn.Module, classes: Classes) -> type[nn.Module] | str | None:
    return next((key for key in (type(module), full_name(module)) if key in classes), None)


def obstacle(module: nn.Module, plain: type[nn.Module]) -> str | None:
    """Return why changing the class of an instance of `plain` would change its behavior, or None."""
    if type(module) is not plain:
        return f"{type(module).__name__} is a subclass of {plain.__name__} and may have its own forward"
    return patched(module)


def patched(module: nn.Module) -> str | None:
    """Return why a new class would not affect the module's forward, or None."""
    patch = "its forward was replaced on the instance, so a new class has no effect"
    return patch if forward_is_replaced(module) else None


def computed(module: nn.Module) -> str | None:
    """Return why its weight is none of its parameters, or None."""
    if "weight" in dict(module.named_parameters(recurse=False)):
        return None
    return "its weight is computed from another parameter, as by spectral_norm or pruning"


def full_name(module: nn.Module) -> str:
    """Return the qualified name of its class, which may be of a package that is not installed."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def places(model: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> Iterator[str]:
    """Yield the state dict prefix, "" or ending in ".", of each module of a kind: two of one registered twice."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            yield f"{name}." if name else ""


def children_of(model: nn.Module, kind: type[nn.Module]) -> set[int]:
    return {id(child) for m in model.modules() if isinstance(m, kind) for child in m.children()}


def rename(state: State, old: str, new: str) -> None:
    if old in state:
        state[new] = state.pop(old)
