"""`from_composer`: an algorithm of MosaicML Composer's as a transform.

It runs the algorithm itself, at the events of Composer's that have a place in Drivetrain's loop.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
import signal
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import PlanError
from . import base
from .base import Kind, Report, Session, State
from .common.composer_state import (
    Probe,
    SilentLogger,
    StateView,
    Unknown,
    brought,
    composer_model,
    host_seeded,
    seeded,
)
from .common.moments import LoopView, Moment
from .common.surgery import refuse_wrapped

PLACES = (
    "init", "fit_start", "iteration_start", "epoch_start", "after_dataloader", "batch_start", "before_train_batch",
    "before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward",
    "after_train_batch", "batch_end", "epoch_end", "eval_before_all", "eval_start", "eval_end", "eval_after_all",
    "fit_end",
)  # fmt: skip
"""The events that have a place, in the order of a run."""
ELSEWHERE = ("eval_standalone_", "predict_")
"""Events outside of training, which a run never reaches, in Composer neither."""
WITHOUT_PLACE: dict[str, tuple[str, ...]] = {
    "fit_start": ("before_load", "after_load"),
    "after_dataloader": ("before_dataloader",),
    "batch_end": ("batch_checkpoint",),
    "epoch_end": ("epoch_checkpoint", "iteration_end", "iteration_checkpoint"),
    "eval_start": ("eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"),
}
"""The events of training without a place, by the one that Drivetrain reaches next to them."""
SHARDED = ("fsdp", "deepspeed", "fairscale")
"""The families of strategies in which a rank does not have all weights and gradients."""
_KEPT = "_composer_algorithms"  # the attribute of a model that holds the algorithms that were at Event.INIT with it


@dataclass(frozen=True)
class Known:
    """What is known of an algorithm of Composer's own.

    Attributes:
        ours: Drivetrain's transform of the same method.
        touches: what it changes: "model" (before wrapping), "batch" (and targets and loss), or "weights".
        compile_safe: whether the changed model compiles without graph breaks.
        depends_on_length: whether its steps depend on the length of training.
        targets: see `Transform.targets`.
        after: names of algorithms of Composer's that must run before it.
        refused: returns why it cannot run here; "" if it can.
    """

    ours: str
    touches: str = "model"
    compile_safe: bool = True
    depends_on_length: bool = False
    targets: tuple[str, ...] | None = None
    after: tuple[str, ...] = ()
    refused: Callable[[Any], str] = lambda _: ""


def _always(why: str) -> Callable[[Any], str]:
    return lambda _: why


_SURGERY = ("BlurPool", "SqueezeExcite", "WeightStandardization", "Factorize", "StochasticDepth")
_FIRST = ("SelectiveBackprop",)
_MIXED = ("class indices", "labels")
_DATASET = _always(
    "It changes the data set of a torch.utils.data.DataLoader, which Drivetrain's loaders are not."
)
KNOWN: dict[str, Known] = {
    "BlurPool": Known("BlurPool()", compile_safe=False),
    "ChannelsLast": Known("ChannelsLast()", after=_SURGERY),  # new modules would be contiguous
    "SqueezeExcite": Known("SqueezeExcite()"),
    "GhostBatchNorm": Known(
        "GhostBatchNorm()", refused=_always("It rejects batches smaller than ghost_batch_size, in evaluation, too.")
    ),
    "WeightStandardization": Known("WeightStandardization()"),
    "Factorize": Known("Factorize()"),
    "StochasticDepth": Known("StochasticDepth()", compile_safe=False, depends_on_length=True),
    "MixUp": Known("MixUp()", "batch", targets=_MIXED, after=_FIRST),
    "CutMix": Known("CutMix()", "batch", targets=_MIXED, after=_FIRST),
    "CutOut": Known("CutOut()", "batch", after=_FIRST),
    "ColOut": Known("ColOut()", "batch", after=_FIRST, refused=lambda a: "" if a.batch else _DATASET(a)),
    # Before MixUp, it would leave the targets that are mixed in as they are.
    "LabelSmoothing": Known("LabelSmoothing()", "batch", targets=_MIXED, after=("MixUp", "CutMix")),
    "ProgressiveResizing": Known("ProgressiveResizing()", "batch", depends_on_length=True, after=_FIRST),
    "SelectiveBackprop": Known("SelectiveBackprop()", "batch", depends_on_length=True),
    "GradientClipping": Known("GradientClipping()", "weights"),
    "EMA": Known("EMA()", "weights", depends_on_length=True),
    "SWA": Known("SWA()", "weights", depends_on_length=True),
    "RandAugment": Known("RandAugment()", refused=_DATASET),
    "AugMix": Known("AugMix()", refused=_DATASET),
    "SAM": Known("SAM()", refused=_always("It replaces the optimizer by one whose step takes a closure.")),
    "LayerFreezing": Known(
        "LayerFreezing()", refused=_always("It removes parameters from the optimizer, which then cannot be resumed.")
    ),
    "GyroDropout": Known("GyroDropout()", refused=_always("Its masks are not in checkpoints.")),
    "LowPrecisionLayerNorm": Known(
        "LowPrecisionLayerNorm()", refused=_always("It reads the precision when the model is built.")
    ),
    "LowPrecisionGroupNorm": Known(
        "LowPrecisionGroupNorm()", refused=_always("It reads the precision when the model is built.")
    ),
    "SeqLengthWarmup": Known("SeqLengthWarmup()", refused=_always("It truncates sequences of tokens.")),
}  # fmt: skip
"""Composer's own algorithms by class name; subclasses are not known."""


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
        compile_safe: whether the model compiles with it without graph breaks. Default: that of Composer's own
            algorithms; else False.
        depends_on_length: whether its steps depend on the length of training. If not, a checkpoint can be resumed with
            more epochs. Default: that of Composer's own algorithms; else True.

    Raises:
        PlanError: if it is not an algorithm, or uses an event or a feature that has no place in Drivetrain's loop.
    """
    _check_algorithm(algorithm)
    name, known = type(algorithm).__name__, _known(algorithm)
    if known is not None and (why := known.refused(algorithm)):
        raise PlanError(
            f"Composer's {name} cannot run in Drivetrain. {why} Use drivetrain.transforms.{known.ours}."
        )
    families = (safe_with,) if isinstance(safe_with, str) else tuple(safe_with)
    for family in families:
        if family not in SHARDED:
            raise PlanError(
                f"from_composer({name}, safe_with={families!r}): {family!r} is not one of {SHARDED}."
            )
    if getattr(algorithm, "backwards_create_graph", False):
        raise PlanError(
            f"Composer's {name} needs a graph of the gradients (backwards_create_graph), which Drivetrain's backward "
            "does not create. Leave it out."
        )
    events = _events(algorithm)
    unused = bool(getattr(algorithm, "find_unused_parameters", False))
    safe = events <= {"init"} or (known is not None and known.touches in ("model", "batch") and not unused)
    kind = _class(
        f"Composer{name}",
        compile_safe=(known is not None and known.compile_safe) if compile_safe is None else compile_safe,
        depends_on_length=(known is None or (known.depends_on_length and events != {"init"}))
        if depends_on_length is None
        else depends_on_length,
        unsafe_with=() if safe else tuple(each for each in SHARDED if each not in families),
        unused_parameters=unused,
        targets=None if known is None else known.targets,
        renames="init" in events and (known is None or known.touches == "model"),
        after=() if known is None else tuple(f"Composer{each}" for each in known.after),
    )
    made: base.Transform = kind(
        algorithm=_copied(algorithm),
        of=_name_of(type(algorithm)),
        settings=_settings(algorithm),
        declared={
            "safe_with": families,
            "compile_safe": compile_safe,
            "depends_on_length": depends_on_length,
        },
        events=tuple(each for each in PLACES if each in events),
    )
    return made


def named_algorithm(name: str, options: Mapping[str, Any]) -> base.Transform:
    """Return `from_composer` of an instance of the class that `"package.module:Class"` names, with these arguments.
    Those of `from_composer` may be among them.

    Importing a module runs its code: read a recipe from others before you use it.

    Raises:
        PlanError: if it cannot be imported, is not an algorithm, or does not take the arguments.
    """
    module, _, path = name.partition(":")
    try:
        with _signals_kept():
            made: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"The transform {name!r} cannot be imported: {error}. Write package.module:Class with an algorithm of "
            "Composer's, which needs: pip install mosaicml."
        ) from error
    own = {
        each: options[each] for each in ("safe_with", "compile_safe", "depends_on_length") if each in options
    }
    if not (isinstance(made, type) and _base_of(made)):
        raise PlanError(
            f"The transform {name!r} is {made!r:.80}, not a subclass of Composer's Algorithm. Other transforms are "
            "named by their class alone."
        )
    try:
        algorithm = made(**{key: value for key, value in options.items() if key not in own})
    except Exception as error:  # its own checks may raise anything
        raise PlanError(f"{name} does not take {dict(options)}: {type(error).__name__}: {error}") from error
    return from_composer(algorithm, **own)


@dataclass(frozen=True, eq=False, repr=False)
class ComposerTransform(base.Transform):
    """An algorithm of Composer's; `from_composer` creates a subclass for each, which declares its facts.

    Attributes:
        algorithm: a copy of the object, which is not changed.
        of: its class, as `package.module:Class`.
        settings: its public attributes, and those that hold arguments of its constructor.
        declared: the keyword arguments of `from_composer`.
        events: the events at which it may run, as far as they could be determined.
    """

    algorithm: Any = field(repr=False)
    of: str
    settings: Mapping[str, Any]
    declared: Mapping[str, Any] = field(repr=False)
    events: tuple[str, ...] = field(repr=False)

    kind: ClassVar[Kind] = "algorithm"
    source: ClassVar[str] = "MosaicML Composer"

    @property
    def known_as(self) -> str:
        """The name of Drivetrain's transform of the same method, if there is one."""
        known = _known(self.algorithm)
        return type(self).__name__ if known is None else known.ours.partition("(")[0]

    @property
    def caution(self) -> str:
        """What the plan says of it."""
        known, at = _known(self.algorithm), f"at {', '.join(self.events) or 'no event'}"
        if known is not None:
            return f"{at}; Drivetrain's own is {known.ours}"
        return (
            f"{at}; it declares nothing, so how it interacts with the other steps is unknown: unsafe with compile, "
            "shards and resuming with more epochs unless from_composer declares otherwise"
        )

    def apply(self, model: nn.Module) -> Report:
        """Run the algorithm at `Event.INIT`, and return the modules that it replaced or changed to another class."""
        name = type(self.algorithm).__name__
        refuse_wrapped(name, model)
        algorithm, wrapped = _copied(self.algorithm), composer_model(model)
        state = StateView(f"Composer's {name}", wrapped, None, algorithm)
        event = brought("core.event").Event.INIT
        modules = {place: (module, type(module)) for place, module in model.named_modules()}
        tensors = _tensors(model)
        with host_seeded([torch.initial_seed()]):
            if algorithm.match(event, state):
                algorithm.apply(event, state, SilentLogger())
        if wrapped.module is not model:
            raise PlanError(
                f"Composer's {name} replaces the model itself, {type(model).__name__}, at Event.INIT. Put the model "
                "into a module, whose parts it can replace."
            )
        kept = vars(model).setdefault(_KEPT, _Kept())
        kept[type(self).__name__] = _Applied(algorithm, wrapped, _renamed(tensors, _tensors(model)))
        changed = [
            place
            for place, module in model.named_modules()
            if place not in modules or modules[place] != (module, type(module))
        ]
        return Report(f"Composer's {name}", tuple(changed))

    def session(self, model: nn.Module) -> Session:
        """Follow a run of a model that `apply` was called with."""
        applied = vars(model).get(_KEPT, {}).get(type(self).__name__)
        if applied is None:
            raise PlanError(f"{self}: call apply(model) before session(model), with the same model.")
        return ComposerSession(self, model, applied)

    def from_plain(self, state: State, model: nn.Module) -> State:
        """Translate names, if `apply` was called with this model; others stay."""
        names = {plain: name for name, plain in self._names(model).items()}
        return {
            (names[key] if names.get(key, key) not in state else key): value for key, value in state.items()
        }

    def to_plain(self, state: State, model: nn.Module) -> State:
        """Translate names, if they follow from the weights before and after `apply`.

        Raises:
            PlanError: if they do not.
        """
        names = self._names(model)
        if None in names.values():
            raise PlanError(
                f"{self} changes weights in a way that cannot be undone by names alone. Use the trained names: "
                "FitResult.model.state_dict(), or export with names='trained'."
            )
        return {names.get(key, key): value for key, value in state.items()}

    def _names(self, model: nn.Module) -> dict[str, Any]:
        applied = vars(model).get(_KEPT, {}).get(type(self).__name__)
        return {} if applied is None else applied.names

    def to_dict(self) -> dict[str, Any]:
        """Return the class and the fewest arguments that create an equal one, for a recipe.

        Raises:
            PlanError: if there are none, or the class cannot be imported by name.
        """
        declared = {key: value for key, value in self.declared.items() if value not in (None, ())}
        arguments, optional = _arguments(self.algorithm)
        for count in range(len(optional) + 1):
            for chosen in itertools.combinations(optional, count):
                entry = {"name": self.of, **arguments, **{key: optional[key] for key in chosen}, **declared}
                with suppress(PlanError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # its constructor has issued them already
                    if "__main__" not in self.of and "<locals>" not in self.of and _rebuilt(entry) == self:
                        return entry
        raise PlanError(
            f"{self} cannot be named in a recipe: the arguments of its constructor are not attributes of the same "
            "names, or its class is not at the top level of a module."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ComposerTransform):
            return NotImplemented
        mine, theirs = (self.of, self.declared), (other.of, other.declared)
        return mine == theirs and _same(self.settings, other.settings)

    def __hash__(self) -> int:
        return hash(self.of)

    def __repr__(self) -> str:
        kind, options = type(self.algorithm), []
        for name, parameter in _parameters(kind).items():
            value = self.settings.get(name, self.settings.get(f"_{name}", parameter.default))
            value = value.to_timestring() if hasattr(value, "to_timestring") else value
            if not isinstance(value, torch.Tensor) and not _same(value, parameter.default):
                options.append(f"{name}={value!r:.60}")
        declared = "".join(
            f", {key}={value!r}" for key, value in self.declared.items() if value not in (None, ())
        )
        return f"from_composer({kind.__name__}({', '.join(options)}){declared})"

    def __reduce__(self) -> tuple[Any, ...]:
        state, sets = dict(vars(self.algorithm)), []
        for key, value in vars(self.algorithm).items():
            if isinstance(value, weakref.WeakSet):  # of data sets that are transformed; cannot be pickled
                sets.append(key)
                del state[key]
        algorithm = copy.copy(self.algorithm)
        vars(algorithm).clear()
        vars(algorithm).update(state)
        return _restored, (algorithm, sets, dict(self.declared))


class _Kept(dict[str, Any]):
    """What a model keeps of its algorithms. Copies of the model do not have it."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _Kept, ()


@dataclass
class _Applied:
    """An algorithm after `Event.INIT`.

    Attributes:
        algorithm: the copy that was applied; runs begin with copies of it.
        model: the `ComposerModel` that it got.
        names: the names before, by the names after; a name that has no one before is left out, and None is before for a
            weight that vanished.
    """

    algorithm: Any
    model: Any
    names: dict[str, Any]


class ComposerSession(Session):
    """An algorithm in a run.

    Args:
        transform: what it is of.
        model: the model.
        applied: the algorithm after `Event.INIT`.
    """

    def __init__(self, transform: ComposerTransform, model: nn.Module, applied: _Applied) -> None:
        self._transform, self._plain, self._model = transform, model, applied.model
        self._name = f"Composer's {type(applied.algorithm).__name__}"
        self._algorithm = self._copy(applied.algorithm)
        self._event = brought("core.event").Event
        self._key = zlib.crc32(transform.of.encode())
        self._loop: LoopView | None = None
        _encoded(
            self._name, self._algorithm.state_dict(), "state", {}
        )  # before training, rather than at a checkpoint

    def at(self, moment: Moment, loop: LoopView) -> None:
        """Run the algorithm, if it matches the event of this moment."""
        self._loop = self._model.steps.loop = loop
        self._run(moment, self._algorithm)

    @contextmanager
    def _evaluation(self, algorithm: Any) -> Iterator[None]:
        self._run("eval_before_all", algorithm)
        self._run("eval_start", algorithm)
        try:
            yield
        finally:
            self._run("eval_end", algorithm)
            self._run("eval_after_all", algorithm)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context between the algorithm's events of evaluation."""
        if self._loop is None:  # the run has not begun
            yield
            return
        with self._evaluation(self._algorithm):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state, and the weights that it evaluates if they are not those in training."""
        tensors: dict[str, torch.Tensor] = {}
        tree = _encoded(self._name, self._algorithm.state_dict(), "state", tensors)
        return {"values": [tree], "tensors": tensors, "averages": self._averages()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the algorithm's state."""
        device = next((p.device for p in self._plain.parameters()), torch.device("cpu"))
        self._algorithm.load_state_dict(_decoded(state["values"][0], state["tensors"], device))

    @torch.no_grad()
    def _averages(self) -> dict[str, torch.Tensor]:
        """Return the weights by name that the algorithm puts into the model for evaluations."""
        loop, event = self._loop, self._event("eval_start")
        if loop is None or not self._algorithm.match(
            event, StateView(self._name, self._model, loop, self._algorithm)
        ):
            return {}
        values = {**dict(self._plain.named_parameters()), **dict(self._plain.named_buffers())}
        own = {name: value.detach().clone() for name, value in values.items()}
        with self._evaluation(self._copy(self._algorithm)):
            found = {name: value.detach().clone() for name, value in values.items()}
        for name, value in values.items():
            value.copy_(own[name])
        return {} if all(torch.equal(own[name], found[name]) for name in own) else found

    def _copy(self, algorithm: Any) -> Any:
        """Return a copy that refers to the same model."""
        return copy.deepcopy(algorithm, {id(self._model): self._model, id(self._plain): self._plain})

    def _run(self, event: str, algorithm: Any) -> None:
        loop = self._loop
        assert loop is not None
        state = StateView(self._name, self._model, loop, algorithm)
        for absent in WITHOUT_PLACE.get(event, ()):
            if algorithm.match(self._event(absent), state):
                raise _no_place(self._name, (absent,))
        here = self._event(event)
        if not algorithm.match(here, state):
            return
        declared, kind = self._transform.declared["safe_with"], type(self._transform)
        if loop.sharded and not declared and (kind.unsafe_with or event not in self._transform.events):
            raise PlanError(
                f"{self._name} runs at Event.{here.name} on shards of the model, which was not known before. Declare "
                "that it is safe there, with from_composer(…, safe_with=(…)), or distribute with 'ddp'."
            )
        with seeded([loop.seed, loop.step, loop.microbatch, self._key, PLACES.index(event)], loop.device):
            algorithm.apply(here, state, SilentLogger())


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
    return any(
        (each.__module__, each.__name__) == ("composer.core.algorithm", "Algorithm") for each in cls.__mro__
    )


def _name_of(kind: type) -> str:
    module = kind.__module__
    return f"{'composer.algorithms' if module.startswith('composer.algorithms.') else module}:{kind.__qualname__}"


def _known(algorithm: Any) -> Known | None:
    own = type(algorithm).__module__.startswith("composer.algorithms.")
    return KNOWN.get(type(algorithm).__name__) if own else None


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
    whose match depends on what a run only knows.

    Raises:
        PlanError: if one of them has no place.
    """
    events, name = brought("core.event").Event, f"Composer's {type(algorithm).__name__}"
    found, absent = set[str](), set[str]()
    for step in (0, 1, 54, 55, 99):
        trial = _copied(algorithm)  # its match may change it
        for event in (each for each in events if not each.value.startswith(ELSEWHERE)):
            state = StateView(name, None, None if event == events.INIT else Probe(step), trial)
            try:
                matches = certain = bool(trial.match(event, state))
            except Unknown:
                matches, certain = True, False
            if matches and event.value in PLACES:
                found.add(event.value)
            elif certain:
                absent.add(event.value)
    if absent:
        raise _no_place(name, sorted(absent))
    return found


def _no_place(name: str, events: Sequence[str]) -> PlanError:
    listed = ", ".join(f"Event.{each.upper()}" for each in events)
    return PlanError(
        f"{name} runs at {listed}, which has no place in Drivetrain's loop. It has: "
        f"{', '.join(each.upper() for each in PLACES)}. Leave it out, or let it match one of these."
    )


@functools.cache
def _class(name: str, **facts: Any) -> type[ComposerTransform]:
    """Return the subclass with these facts; the same for equal ones."""
    return type(name, (ComposerTransform,), {"__module__": __name__, **facts})


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    return {
        name: each for name, each in inspect.signature(kind).parameters.items() if each.kind not in (2, 4)
    }


def _settings(algorithm: Any) -> dict[str, Any]:
    known = _parameters(type(algorithm))
    return {
        name: value
        for name, value in vars(_copied(algorithm)).items()
        if (not name.startswith("_") or name[1:] in known) and not isinstance(value, weakref.WeakSet)
    }


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; objects without a comparison of their own, by their attributes."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):
        return _same(vars(one), vars(other))
    return bool(one == other)


def _arguments(algorithm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments without a default, and those that may differ from theirs, as JSON values."""
    needed, optional = {}, {}
    for name, parameter in _parameters(type(algorithm)).items():
        value = getattr(algorithm, name, getattr(algorithm, f"_{name}", None))
        if hasattr(value, "to_timestring"):
            value = value.to_timestring()
        if parameter.default is inspect.Parameter.empty:
            needed[name] = value
        elif isinstance(value, bool | int | float | str) and value != parameter.default:
            optional[name] = value
    return needed, {name: optional[name] for name in list(optional)[:8]}


def _rebuilt(entry: dict[str, Any]) -> base.Transform:
    return named_algorithm(entry["name"], {key: value for key, value in entry.items() if key != "name"})


def _restored(algorithm: Any, sets: Sequence[str], declared: Mapping[str, Any]) -> base.Transform:
    for name in sets:
        setattr(algorithm, name, weakref.WeakSet())
    return from_composer(algorithm, **declared)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handlers of Ctrl-C and SIGTERM, which Composer replaces when it is imported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict(keep_vars=True))


def _renamed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the names before, by those after: of the same tensor, or else the only new one with equal values. A weight
    without a successor is None's."""
    names: dict[str, Any] = {}
    left = {name: tensor for name, tensor in before.items() if name not in after}
    new = {name: tensor for name, tensor in after.items() if name not in before}
    for plain, tensor in left.items():
        same = [name for name, other in new.items() if other is tensor]
        same = same or [
            name
            for name, other in new.items()
            if name not in names and other.shape == tensor.shape and _equal(other, tensor)
        ]
        names[same[0] if len(same) == 1 else f"?{plain}"] = plain if len(same) == 1 else None
    return names


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.device == other.device and one.device.type != "meta" and bool(torch.equal(one, other))


def _encoded(name: str, value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a state as JSON values, with its tensors in `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {"tensor": [path, value.device.type]}
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        items = [[key, _encoded(name, each, f"{path}/{key}", tensors)] for key, each in value.items()]
        return {"dict": items}
    if type(value) in (list, tuple):
        parts = [_encoded(name, each, f"{path}/{number}", tensors) for number, each in enumerate(value)]
        return {type(value).__name__: parts}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise PlanError(
        f"{name}: {path} of its state_dict() is {value!r:.80}, a {type(value).__name__}, which a checkpoint cannot "
        "contain. Return tensors, numbers, texts, None, and dicts and lists of them."
    )


def _decoded(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        path, where = content
        return tensors[path].to("cpu" if where == "cpu" else device)
    if kind == "dict":
        return {key: _decoded(each, tensors, device) for key, each in content}
    parts = [_decoded(each, tensors, device) for each in content]
    return tuple(parts) if kind == "tuple" else parts


__all__ = ["ComposerTransform", "from_composer", "named_algorithm"]
