"""`from_composer`: an algorithm of MosaicML Composer's as a transform, run at the events that Drivetrain's loop has."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...common.errors import PlanError
from ...common.names import imported
from ...common.signals import handlers_kept
from .. import base
from ..base import Report, Session, State
from ..common.surgery import refuse_wrapped
from . import session
from .session import PLACES, Applied, ComposerSession, Probe, StateView, brought


@dataclass(frozen=True)
class Known:
    touches: str = "model"  # before wrapping; or "batch", which means targets and loss, too, or "weights"
    compile_safe: bool = True
    depends_on_length: bool = False
    targets: tuple[str, ...] | None = None
    soft_targets: bool = False
    after: tuple[str, ...] = ()
    refused: str = ""  # why it cannot run here


_SURGERY = ("BlurPool", "SqueezeExcite", "WeightStandardization", "Factorize", "StochasticDepth")
_FIRST = ("SelectiveBackprop",)
_MIXED = ("class indices", "labels")
_DATASET = "It changes the data set of a torch.utils.data.DataLoader, which Drivetrain's loaders are not."
_PRECISION = "It reads the precision when the model is built."
KNOWN: dict[str, Known] = {
    "BlurPool": Known(compile_safe=False),
    "ChannelsLast": Known(after=_SURGERY),  # new modules would be contiguous
    "SqueezeExcite": Known(),
    "GhostBatchNorm": Known(refused="It rejects batches smaller than ghost_batch_size, in evaluation, too."),
    "WeightStandardization": Known(),
    "Factorize": Known(),
    "StochasticDepth": Known(compile_safe=False, depends_on_length=True),
    "MixUp": Known("batch", targets=_MIXED, soft_targets=True, after=_FIRST),
    "CutMix": Known("batch", targets=_MIXED, soft_targets=True, after=_FIRST),
    "CutOut": Known("batch", after=_FIRST),
    "ColOut": Known("batch", after=_FIRST, refused=_DATASET),  # but for batch=True
    # Before MixUp, it would leave the targets that are mixed in as they are.
    "LabelSmoothing": Known("batch", targets=_MIXED, soft_targets=True, after=("MixUp", "CutMix")),
    "ProgressiveResizing": Known("batch", depends_on_length=True, after=_FIRST),
    "SelectiveBackprop": Known("batch", depends_on_length=True, targets=("class indices",)),
    "GradientClipping": Known("weights"),
    "EMA": Known("weights", depends_on_length=True),
    "SWA": Known("weights", depends_on_length=True),
    "RandAugment": Known(refused=_DATASET),
    "AugMix": Known(refused=_DATASET),
    "SAM": Known(refused="It replaces the optimizer by one whose step takes a closure."),
    "LayerFreezing": Known(refused="It removes parameters from the optimizer, which then cannot be resumed."),
    "GyroDropout": Known(refused="Its masks are not in checkpoints."),
    "LowPrecisionLayerNorm": Known(refused=_PRECISION),
    "LowPrecisionGroupNorm": Known(refused=_PRECISION),
    "NoOpModel": Known(refused="It replaces the model itself."),
    "SeqLengthWarmup": Known(refused="It truncates sequences of tokens."),
}
"""Composer's own algorithms by class name. All but NoOpModel are also the names of transforms."""
OWN = "composer.algorithms"


def known_of(algorithm: Any) -> Known | None:
    """Return what is known of an algorithm; None if its class is the user's, also if it is derived from Composer's."""
    kind = type(algorithm)
    return KNOWN.get(kind.__name__) if kind.__module__.startswith(f"{OWN}.") else None


SHARDED = ("fsdp", "deepspeed", "fairscale")
"""The families of strategies in which a rank does not have all weights and gradients."""
_KEPT = "_composer_algorithms"  # the attribute of a model that holds the algorithms that were at Event.INIT with it


def from_composer(
    algorithm: Any,
    *,
    safe_with: Sequence[str] = (),
    compile_safe: bool | None = None,
    depends_on_length: bool | None = None,
) -> base.Transform:
    """Return an algorithm of Composer's, or of a subclass of its `Algorithm`, as a transform.

    It is copied, so that training does not change the object. Its `apply` runs at `Event.INIT` when the model is built,
    before wrapping, and then at the events of the loop for which `match` returns True. What an algorithm of your own
    does is unknown: it is rejected where that might be wrong, unless it is declared safe here.

    Args:
        algorithm: the object.
        safe_with: families of sharded strategies ("fsdp", "deepspeed", "fairscale") in which it works, too, although
            ranks have shards of weights and gradients. Not required if it only changes the model at `Event.INIT`, and
            for Composer's own algorithms that only change batches and losses.
        compile_safe: whether the model compiles without graph breaks. Default: that of Composer's own; else False.
        depends_on_length: whether its steps depend on the length of training. If not, a checkpoint can be resumed with
            more epochs. Default: that of Composer's own algorithms; else True.

    Raises:
        PlanError: if it is not an algorithm, or uses an event or a feature that has no place in Drivetrain's loop.
    """
    _check_algorithm(algorithm)
    name, known = type(algorithm).__name__, known_of(algorithm)
    if known is not None and known.refused and not getattr(algorithm, "batch", False):
        remedy = "Leave it out." if name == "NoOpModel" else f"Use drivetrain.transforms.{name}()."
        raise PlanError(f"Composer's {name} cannot run in Drivetrain. {known.refused} {remedy}")
    families = (safe_with,) if isinstance(safe_with, str) else tuple(safe_with)
    for family in families:
        if family not in SHARDED:
            raise PlanError(f"from_composer({name}, safe_with={families!r}): {family!r} is not one of {SHARDED}.")
    if getattr(algorithm, "backwards_create_graph", False):
        raise PlanError(
            f"Composer's {name} needs a graph of the gradients (backwards_create_graph), which Drivetrain's backward "
            "does not create. Leave it out."
        )
    events = _events(algorithm)
    unused = bool(getattr(algorithm, "find_unused_parameters", False))
    safe = events <= {"init"} or (known is not None and known.touches in ("model", "batch") and not unused)
    declared = {"safe_with": families, "compile_safe": compile_safe, "depends_on_length": depends_on_length}
    facts = known or Known("", compile_safe=False, depends_on_length=True)
    same = name if known else ""  # the transform of the same method
    if compile_safe is None:
        compile_safe = facts.compile_safe
    if depends_on_length is None:
        depends_on_length = facts.depends_on_length and (known is None or events != {"init"})
    kind = _class(
        f"Composer{name}",
        compile_safe=compile_safe,
        depends_on_length=depends_on_length,
        unsafe_with=() if safe else tuple(each for each in SHARDED if each not in families),
        unused_parameters=unused,
        averages_weights=same in ("EMA", "SWA"),
        changes_image_size=same == "ProgressiveResizing",
        clips_gradients=same == "GradientClipping",
        targets=facts.targets,
        soft_targets=facts.soft_targets and not getattr(algorithm, "interpolate_loss", False),
        keeps_samples=same not in ("MixUp", "CutMix", "SelectiveBackprop"),
        selects_samples=same == "SelectiveBackprop",
        replaces_targets=same in ("MixUp", "CutMix", "LabelSmoothing"),
        renames="init" in events and facts.touches in ("", "model"),
        after=tuple(f"Composer{each}" for each in facts.after),
    )
    places = tuple(each for each in PLACES if each in events)
    return kind(_copied(algorithm), _name_of(type(algorithm)), _settings(algorithm), declared, places)


def imported_class(name: str) -> Any:
    """Return the class that `"package.module:Class"` names. Its import keeps the signal handlers."""
    try:
        with handlers_kept():
            return imported("transform", name)
    except PlanError as error:
        if name.startswith("composer."):
            raise PlanError(f"{error} An algorithm of Composer's needs: pip install mosaicml.") from error
        raise


def algorithm_of(kind: object, name: str, options: Mapping[str, Any]) -> base.Transform:
    """Return `from_composer` of an instance of a class. Arguments of `from_composer` may be among the options."""
    declared = ("safe_with", "compile_safe", "depends_on_length")
    own = {each: options[each] for each in declared if each in options}
    if not (isinstance(kind, type) and _base_of(kind)):
        raise PlanError(
            f"The transform {name!r} is {kind!r:.80}, neither a subclass of drivetrain.transforms.Transform nor of "
            "Composer's Algorithm."
        )
    try:
        algorithm = kind(**{key: value for key, value in options.items() if key not in own})
    except Exception as error:  # its own checks may raise anything
        raise PlanError(f"{name} does not take {dict(options)}: {type(error).__name__}: {error}") from error
    return from_composer(algorithm, **own)


@dataclass(frozen=True, eq=False, repr=False)
class ComposerTransform(base.Transform):
    """An algorithm of Composer's; `from_composer` creates a subclass for each, which declares its facts."""

    algorithm: Any = field(repr=False)  # a copy, which is not changed
    of: str  # its class, as `package.module:Class`
    settings: Mapping[str, Any]  # its public attributes, and those that hold arguments of its constructor
    declared: Mapping[str, Any] = field(repr=False)  # the keyword arguments of `from_composer`
    events: tuple[str, ...] = field(repr=False)  # at which it may run, as far as they could be determined

    kind = "algorithm"
    source = "MosaicML Composer"

    def __post_init__(self) -> None:
        """Check nothing: `from_composer` does."""

    @property
    def known_as(self) -> str:
        return type(self if known_of(self.algorithm) is None else self.algorithm).__name__

    @property
    def unknown(self) -> bool:
        return known_of(self.algorithm) is None and not set(self.events) <= {"init"}

    @property
    def follows_loop(self) -> bool:
        return self.events != ("init",)

    @property
    def caution(self) -> str:
        at = f"at {', '.join(self.events) or 'no event'}"
        if known_of(self.algorithm) is not None:
            return f"{at}; Drivetrain's own is {self.known_as}()"
        return (
            f"{at}; it declares nothing, so how it interacts with the other steps is unknown: unsafe with compile, "
            "shards and resuming with more epochs unless from_composer declares otherwise"
        )

    def apply(self, model: nn.Module) -> Report:
        name = type(self.algorithm).__name__
        refuse_wrapped(name, model)
        algorithm, wrapped = _copied(self.algorithm), session.composer_model(model)
        state = StateView(f"Composer's {name}", wrapped, None, algorithm)
        event = brought("core.event").Event.INIT
        modules = {place: (module, type(module)) for place, module in model.named_modules()}
        tensors = model.state_dict(keep_vars=True)
        with session.seeded([torch.initial_seed()]):
            if algorithm.match(event, state):
                algorithm.apply(event, state, session.SilentLogger())
        if wrapped.module is not model:
            raise PlanError(
                f"Composer's {name} replaces the model itself, {type(model).__name__}, at Event.INIT. Put the model "
                "into a module, whose parts it can replace."
            )
        names = _renamed(tensors, model.state_dict(keep_vars=True))
        vars(model).setdefault(_KEPT, _Kept())[type(self).__name__] = Applied(algorithm, wrapped, names)
        changed = [place for place, m in model.named_modules() if modules.get(place) != (m, type(m))]
        return Report(f"Composer's {name}", tuple(changed))

    def session(self, model: nn.Module) -> Session:
        if (applied := self._applied(model)) is None:
            raise PlanError(f"{self}: call apply(model) before session(model), with the same model.")
        places = () if self.unsafe_with else self.events
        return ComposerSession(self.of, model, applied, PLACES if self.declared["safe_with"] else places)

    def from_plain(self, state: State, model: nn.Module) -> State:
        names = {plain: name for name, plain in self._names(model).items()}
        return {(names[key] if names.get(key, key) not in state else key): v for key, v in state.items()}

    def to_plain(self, state: State, model: nn.Module) -> State:
        """Translate names, which must follow from the weights before and after `apply`. Weights it adds keep theirs."""
        names = self._names(model)
        if None in names.values():
            raise PlanError(
                f"{self} changes weights in a way that cannot be undone by names alone. Use the trained names: "
                "FitResult.model.state_dict(), or export with names='trained'."
            )
        return {names.get(key, key): value for key, value in state.items()}

    def _applied(self, model: nn.Module) -> Applied | None:
        applied: Applied | None = vars(model).get(_KEPT, {}).get(type(self).__name__)
        return applied

    def _names(self, model: nn.Module) -> dict[str, Any]:
        applied = self._applied(model)
        return {} if applied is None else applied.names

    def to_dict(self) -> dict[str, Any]:
        """Return the class and the fewest arguments that create an equal one, for a recipe."""
        arguments, optional = _arguments(self.algorithm)
        nameable = "__main__" not in self.of and "<locals>" not in self.of
        for count in range(len(optional) + 1) if nameable else ():
            for chosen in itertools.combinations(optional, count):
                options = {**arguments, **{key: optional[key] for key in chosen}, **self._declared()}
                with suppress(PlanError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # its constructor has issued them already
                    again = algorithm_of(imported_class(self.of), self.of, options)
                    if again == self and "name" not in options:
                        return {"name": self.of, **options}
        raise PlanError(
            f"{self} cannot be named in a recipe: the arguments of its constructor are not attributes of the same "
            "names, or its class is not at the top level of a module."
        )

    def _declared(self) -> dict[str, Any]:
        return {key: value for key, value in self.declared.items() if value not in (None, ())}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ComposerTransform):
            return NotImplemented
        declared = (self.of, self.declared) == (other.of, other.declared)
        return declared and _same(self.settings, other.settings)

    def __hash__(self) -> int:
        return hash(self.of)

    def __repr__(self) -> str:
        kind, options = type(self.algorithm), []
        for name, parameter in _parameters(kind).items():
            value = self.settings.get(name, self.settings.get(f"_{name}", parameter.default))
            value = value.to_timestring() if hasattr(value, "to_timestring") else value
            if not isinstance(value, Tensor | np.ndarray) and not _same(value, parameter.default):
                options.append(f"{name}={value!r:.60}")
        declared = "".join(f", {key}={value!r}" for key, value in self._declared().items())
        return f"from_composer({kind.__name__}({', '.join(options)}){declared})"

    def __reduce__(self) -> tuple[Any, ...]:
        algorithm = copy.copy(self.algorithm)
        # WeakSets of data sets that are transformed; they cannot be pickled.
        sets = [key for key, value in vars(algorithm).items() if isinstance(value, weakref.WeakSet)]
        for key in sets:
            del vars(algorithm)[key]
        return _restored, (algorithm, sets, dict(self.declared))


class _Kept(dict[str, Any]):
    """What a model keeps of its algorithms. Copies of the model do not have it."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _Kept, ()


def _check_algorithm(algorithm: Any) -> None:
    if isinstance(algorithm, type) and _base_of(algorithm):
        raise PlanError(
            f"from_composer() takes an object, not the class {algorithm.__name__}. Pass {algorithm.__name__}()."
        )
    if not _base_of(type(algorithm)):
        hint = " It is a transform of Drivetrain's already." if isinstance(algorithm, base.Transform) else ""
        raise PlanError(
            f"from_composer() takes an algorithm of Composer's (composer.core.Algorithm), not {algorithm!r:.80}.{hint}"
        )


def _base_of(cls: type) -> bool:
    name = ("composer.core.algorithm", "Algorithm")
    return any((each.__module__, each.__name__) == name for each in cls.__mro__)


def _name_of(kind: type) -> str:
    return f"{OWN if kind.__module__.startswith(f'{OWN}.') else kind.__module__}:{kind.__qualname__}"


def _copied(algorithm: Any) -> Any:
    try:
        return copy.deepcopy(algorithm)
    except Exception as error:  # the object's own code may raise anything
        raise PlanError(
            f"Composer's {type(algorithm).__name__} cannot be copied ({type(error).__name__}: {error}). Create in "
            "apply() what cannot be copied."
        ) from error


def _events(algorithm: Any) -> set[str]:
    """Return the events of a run that the algorithm matches at its beginning, in the middle, or at its end, and those
    whose match depends on what a run only knows; raise an error if one of them has no place."""
    events, name = brought("core.event").Event, f"Composer's {type(algorithm).__name__}"
    found, absent = set[str](), set[str]()
    for step in (0, 1, 54, 55, 99):
        trial = _copied(algorithm)  # its match may change it
        for event in (each for each in events if not each.value.startswith(session.ELSEWHERE)):
            state = StateView(name, None, None if event == events.INIT else Probe(step), trial)
            try:
                matches = certain = bool(trial.match(event, state))
            except session.Unknown:
                matches, certain = True, False
            if matches and event.value in PLACES:
                found.add(event.value)
            elif certain:
                absent.add(event.value)
    if absent:
        raise session.no_place(name, sorted(absent))
    return found


@functools.cache
def _class(name: str, **facts: Any) -> type[ComposerTransform]:
    return type(name, (ComposerTransform,), {"__module__": __name__, **facts})


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(kind).parameters
    return {name: each for name, each in parameters.items() if each.kind not in (2, 4)}


def _settings(algorithm: Any) -> dict[str, Any]:
    known = _parameters(type(algorithm))
    return {
        name: value
        for name, value in vars(_copied(algorithm)).items()
        if (not name.startswith("_") or name[1:] in known) and not isinstance(value, weakref.WeakSet)
    }


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    kind: Any = type(one)
    if kind.__eq__ is object.__eq__ and hasattr(one, "__dict__"):
        return _same(vars(one), vars(other))
    return bool(one == other)


def _arguments(algorithm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments without a default, and those that may differ from theirs, as JSON values."""
    needed, optional = {}, {}
    for name, parameter in _parameters(type(algorithm)).items():
        value: Any = getattr(algorithm, name, getattr(algorithm, f"_{name}", None))
        if hasattr(value, "to_timestring"):
            value = value.to_timestring()
        if parameter.default is inspect.Parameter.empty:
            needed[name] = value
        elif isinstance(value, bool | int | float | str) and value != parameter.default:
            optional[name] = value
    return needed, {name: optional[name] for name in list(optional)[:8]}


def _restored(algorithm: Any, sets: Sequence[str], declared: Mapping[str, Any]) -> base.Transform:
    for name in sets:
        setattr(algorithm, name, weakref.WeakSet())
    return from_composer(algorithm, **declared)


def _renamed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the names before by those after: of the same tensor, else the only equal new one; None without one."""
    names: dict[str, Any] = {}
    left = {name: tensor for name, tensor in before.items() if name not in after}
    new = {name: tensor for name, tensor in after.items() if name not in before}
    for plain, tensor in left.items():
        same = [name for name, other in new.items() if other is tensor]
        same = same or [name for name, other in new.items() if name not in names and _equal(other, tensor)]
        names[same[0] if len(same) == 1 else f"?{plain}"] = plain if len(same) == 1 else None
    return names


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.device.type != "meta" and bool(torch.equal(one, other))
