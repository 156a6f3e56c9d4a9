"""The base of all transforms: a frozen dataclass that declares facts about itself and does one thing.

Only the plan (`pipeline/describe/plan.py`) knows the ordering rules; a transform declares the facts those rules
need. Every transform also works on its own, in any training loop.
"""

from __future__ import annotations

import difflib
import html
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ..common.checks import is_number
from ..common.errors import PlanError, first_of, suggest
from ..common.options import config
from ..common.options.config import Natural as Natural
from ..common.options.config import Positive as Positive
from ..common.table import Table
from .common.moments import Loop as Loop
from .common.moments import Session as Session

Kind = Literal[
    "image", "surgery", "algorithm", "memory_format", "optimizer", "batch", "loss", "schedule", "loop",
    "evaluation",
]  # fmt: skip
CHANGES_MODEL: tuple[Kind, ...] = ("surgery", "algorithm", "memory_format")
"""The kinds whose `apply` changes the model, before it is wrapped."""
State = dict[str, Tensor]
"""A state dict: parameters and persistent buffers by name."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss: maps logits `(B, C)` and targets, `(B,)` class indices or `(B, C)` probabilities, to a scalar."""
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""Builds an optimizer over parameters (or parameter groups): `lambda params: SGD(params, lr=0.1)`."""

# Types of fields, which carry the check of their values.
AboveZero = Annotated[float, config.Within("(0, inf)")]
Fraction = Annotated[float, config.Within("[0, 1]")]
FractionAboveZero = Annotated[float, config.Within("(0, 1]")]
FractionBelowOne = Annotated[float, config.Within("[0, 1)")]
ProperFraction = Annotated[float, config.Within("(0, 1)")]
Size = Annotated[
    int | float,
    config.Kind(
        lambda value: is_number(value, "(0, inf)") and (value < 1 or value == int(value)),
        "an integer ≥ 1, or a fraction in (0, 1)",
    ),
]


@dataclass(frozen=True)
class Report:
    """What a transform changed, by module name, and what it skipped.

    Attributes:
        transform: the transform's class name.
        changed: names of the changed modules, in model order; `""` is the model itself.
        skipped: `(module name, reason)` of each candidate that was left unchanged.
        notes: further information for the user, one sentence each.

    Example::

        >>> report = BlurPool().apply(model)
        >>> report.changed[:2]
        ('maxpool', 'layer2.0.conv1')
    """

    transform: str
    changed: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """Return the report as lines of text: the first names of each list, with `verbose` all of them."""
        lines = [f"{self.transform}: changed {len(self.changed)} module(s)"]
        if self.changed:
            lines.append(f"  changed: {_names(self.changed, verbose)}")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped:
            reasons.setdefault(reason, []).append(name)
        lines += [f"  left alone: {_names(names, verbose)}: {reason}" for reason, names in reasons.items()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [("changed", name or "(the model)", "") for name in self.changed]
        rows += [("left alone", name or "(the model)", reason) for name, reason in self.skipped]
        rows += [("note", "", note) for note in self.notes]
        title = f"<b>{html.escape(self.transform)}</b>: changed {len(self.changed)} module(s)"
        return title + Table((), rows).html() if rows else title


def _names(modules: Sequence[str], verbose: bool) -> str:
    names = [name or "(the model)" for name in modules]
    return first_of(names, len(names) if verbose or len(names) == 5 else 4)


@dataclass(frozen=True)
class BatchContext:
    """What a batch transform may use besides the batch.

    Attributes:
        generator: CPU generator, seeded by the caller for this microbatch; the source of all randomness.
        progress: fraction of training completed, 0 to 1.
        classes: width of the soft targets made from class indices; None if targets are already soft.
        model: used by SelectiveBackprop: maps images to logits (B, C).
        loss: used by SelectiveBackprop: the training loss.
        step: used by SelectiveBackprop: number of optimizer steps done so far, from 0.

    Example::

        >>> context = BatchContext(torch.Generator().manual_seed(0), progress=0.5, classes=2)
        >>> mixed, targets = MixUp(0.2).batch(images, labels, context)
        >>> targets.shape
        torch.Size([8, 2])
    """

    generator: torch.Generator
    progress: float = 0.0
    classes: int | None = None
    model: Callable[[Tensor], Tensor] | None = None
    loss: Loss | None = None
    step: int | None = None


@dataclass(frozen=True)
class Transform:
    """Base of all transforms: the facts the plan reads, with safe defaults.

    Drivetrain's transforms raise `PlanError` at construction for a value that its type or the documentation excludes.
    `apply` can be called again: what it has changed before stays, and is noted in the report.

    A subclass sets the class variables and overrides the one hook of its kind: `loader_settings` for image, `apply` for
    surgery and memory format, `loss` for loss, `batch` for batch, `predict` for evaluation, `session` for schedule and
    loop, and one of `optimizer` and `session` for optimizer, which changes gradients or the step. The kind algorithm is
    that of `from_composer`, with both `apply` and `session`.

    Example::

        >>> @dataclass(frozen=True)
        ... class Brighter(Transform):
        ...     kind = "batch"
        ...     source = "our own"
        ...
        ...     def batch(self, images, targets, context):
        ...         return images + 0.1, targets
        >>> pipeline = pipeline.transform(Brighter())
    """

    kind: ClassVar[Kind]
    source: ClassVar[str]
    """The publication that describes the method."""
    renames: ClassVar[bool] = False
    """Whether parameter names in the state dict change."""
    on_meta: ClassVar[bool] = False
    """Whether `apply` neither reads nor sets values of weights, so that it can change a model on the meta device."""
    after: ClassVar[tuple[str, ...]] = ()
    """Class names of transforms that must run before this one; the class docstring explains why."""
    compile_safe: ClassVar[bool] = True
    """Whether the changed model compiles without graph breaks, with `torch.compile(fullgraph=True)`."""
    unsafe_with: ClassVar[tuple[str, ...]] = ()
    """Families of strategies ("ddp", "fsdp", "deepspeed", "fairscale") it excludes; its docstring says why."""
    excludes: ClassVar[tuple[str, ...]] = ()
    """Class names of transforms that it cannot be combined with; its docstring says why."""
    targets: ClassVar[tuple[str, ...] | None] = None
    """The kinds of targets it can be used with, of "class indices", "labels", "values" and "masks" (see
    `pipeline.tasks`); None: all, because it does not use them."""
    soft_targets: ClassVar[bool] = False
    """Whether it turns class indices into probabilities, before the loss."""
    replaces_targets: ClassVar[bool] = False
    """Whether its session replaces the targets of a microbatch, of which the loss then has another denominator."""
    unused_parameters: ClassVar[bool] = False
    """Whether some steps leave a parameter without a gradient, so that DDP needs find_unused_parameters."""
    averages_weights: ClassVar[bool] = False
    """Whether its session sets the weights to evaluate; a pipeline has at most one such transform."""
    changes_image_size: ClassVar[bool] = False
    """Whether images have several sizes during training."""
    clips_gradients: ClassVar[bool] = False
    """Whether it does what `distribute(clip_norm=…)` does."""
    counts_forwards: ClassVar[bool] = False
    """Whether the changed model computes something else in each forward, so that none may be repeated."""
    groups_statistics: ClassVar[bool] = False
    """Whether BatchNorm's statistics become those of a part of the batch."""
    takes_tokens: ClassVar[bool] = False
    """Whether it changes sequences of tokens, which a pipeline does not load."""
    keeps_samples: ClassVar[bool] = False
    """Of a transform of batches: whether each image that it returns is still of one sample, in its place in them."""
    selects_samples: ClassVar[bool] = False
    """Of a transform of batches: whether it needs the loss of each sample, by `reduction="none"`."""
    prunes_samples: ClassVar[bool] = False
    """Whether its session leaves samples out of epochs, and weights the losses of others, by the loss of each."""
    tried_by_tune: ClassVar[Literal["", "format", "resolution", "surgery", "methods"]] = ""
    """The kind of change as which `Pipeline.tune` tries it, with its defaults; "" if it does not. "methods", whose gain
    is not in the speed of a step alone, only with a target."""

    def __post_init__(self) -> None:
        # Not the fields of a custom subclass, whose types may be anything.
        own = next(each for each in type(self).__mro__ if each.__module__.startswith(f"{__package__}."))
        options: Any = config.options_of
        for name, option in options(own).items():
            value = getattr(self, name)
            if not any(kind.fits(value) for kind in option.kinds):
                allowed = config.either([each for kind in option.kinds for each in kind.names])
                raise PlanError(f"{type(self).__name__}({name}={value!r}): pass {allowed}.")

    @property
    def depends_on_length(self) -> bool:
        """Whether the steps depend on the length of training; then a checkpoint cannot be resumed with other epochs.

        A class that overrides `begin`, `batch` or `session`, which receive the length or the fraction completed, must
        declare it: as a property, if settings decide, or as a class variable. Without a declaration, as in a subclass
        that overrides one of these methods again, the answer is True: see `declares_length`.
        """
        return self.kind == "schedule" or _overrides(type(self), "begin", "batch", "session")

    @property
    def known_as(self) -> str:
        """The name of its method; a pipeline takes one transform of each."""
        return type(self).__name__

    @property
    def unknown(self) -> bool:
        """Whether it may change batches, outputs or the loss in ways that it does not declare."""
        return False

    @property
    def follows_loop(self) -> bool:
        """Whether it needs Drivetrain's loop, so that Lightning's cannot run it."""
        return _overrides(type(self), "session")

    @property
    def needs_whole_weights(self) -> str:
        """What to use instead where weights are sharded, completing "Use …"; "" if it works there."""
        return ""

    @property
    def turning_points(self) -> tuple[float, ...]:
        """Fractions of training at which `size`, `level`, or the size of the images that `batch` returns begins or ends
        to change, for a ledger's trials."""
        return ()

    @property
    def caution(self) -> str:
        """What the plan adds to the reason of this step; "" for nothing."""
        return ""

    @property
    def loader_settings(self) -> dict[str, Any]:
        """Settings for the training loader, which then processes each image."""
        return {}

    def apply(self, model: nn.Module) -> Report:  # noqa: ARG002
        """Change `model` in place and return what changed."""
        if self.kind in CHANGES_MODEL:
            raise PlanError(missing_hook(type(self)))
        raise TypeError(f"{type(self).__name__} does not change the model; it is a {self.kind} transform")

    def begin(self, model: nn.Module, total_steps: int) -> None:
        """Prepare a changed model for a training run of `total_steps` optimizer steps. For surgeries only."""

    def from_plain(self, state: State, model: nn.Module) -> State:  # noqa: ARG002
        """Translate a plain model's state dict, into a new one, for the changed `model`; only its structure is read.

        With several surgeries, call it in the order they were applied. Loading plain weights before the surgery, or
        their translation after it, results in the same model. Entries already in the changed form are kept.
        """
        return dict(state)

    def to_plain(self, state: State, model: nn.Module) -> State:  # noqa: ARG002
        """Translate the changed model's state dict for the plain model; returns a new dict.

        With several surgeries, call it in reverse order. If the plain model can express the function, it produces the
        same output with the result; otherwise the class docstring describes the result.
        """
        return dict(state)

    def loss(self, loss: Loss) -> Loss:
        """Return the training loss, made from `loss`. Evaluation keeps the original."""
        return loss

    def batch(self, images: Tensor, targets: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the batch to train on. The inputs are not modified.

        Drivetrain's own take images (B, 3, H, W), whose dtype and memory format they preserve, and targets (B,), class
        indices, or (B, C), probabilities. They raise `DataError` for a batch of another shape.
        """
        return images, targets

    def size(self, image_size: int | tuple[int, int], progress: float) -> int | tuple[int, int]:  # noqa: ARG002
        """Return the side, or height and width, of training images at `progress`, 0 to 1; `image_size` is the full one.
        If a class overrides it, the loader of a pipeline resizes, and `batch` is for other loaders."""
        return image_size

    def sizes(self, image_size: int | tuple[int, int]) -> tuple[int | tuple[int, int], ...]:
        """Return the sizes of images that the model gets in training, besides those of `size`; it must accept them."""
        return (image_size,)

    def level(self, progress: float) -> float:  # noqa: ARG002
        """Return the fraction of the layers that are frozen at `progress`, 0 to 1."""
        return 0.0

    def freeze(self, model: nn.Module, progress: float) -> Report:  # noqa: ARG002
        """Freeze the layers due at `progress`, 0 to 1, and return their names."""
        return Report(type(self).__name__)

    def check_epochs(self, epochs: int, image_size: int | tuple[int, int]) -> None:
        """Raise `PlanError` if a run of so many epochs is too short, with images of this size."""

    def note(self, total_steps: int) -> str:  # noqa: ARG002
        """Return a sentence for the user about a run of so many steps; "" for nothing."""
        return ""

    def predict(self, model: Callable[[Tensor], Any], images: Tensor) -> Any:
        """Return the outputs to evaluate, of images (B, 3, H, W); `model` returns those of a forward."""
        return model(images)

    def optimizer(self, factory: OptimizerFactory) -> OptimizerFactory:
        """Return the factory that builds the optimizer, made from `factory`."""
        return factory

    def session(self, model: nn.Module) -> Session:  # noqa: ARG002
        """Start tracking a training run of `model`, after it is moved to its device, sharded and loaded."""
        return Session()


def _overrides(cls: type[Transform], *methods: str) -> bool:
    return any(getattr(cls, name) is not getattr(Transform, name) for name in methods)


HOOKS: dict[Kind, tuple[str, ...]] = {
    "image": ("loader_settings",), "surgery": ("apply",), "algorithm": ("session",),
    "memory_format": ("apply",), "optimizer": ("optimizer", "session"), "batch": ("batch",),
    "loss": ("loss",), "schedule": ("session",), "loop": ("session",), "evaluation": ("predict",),
}  # fmt: skip
"""The hooks of which a class of each kind must define one."""


def is_own(defined: Any) -> bool:
    """Return whether one of Drivetrain's own transforms is, or defines, this class or method."""
    return bool(defined.__module__.startswith(f"{__name__.rpartition('.')[0]}."))


def missing_hook(cls: type[Transform]) -> str:
    """Return an error message about the hook that `cls` lacks, with the remedy; "" for none."""
    kind: object = getattr(cls, "kind", None)
    if kind not in get_args(Kind):
        return f"{cls.__name__} has kind={kind!r}; it must declare one.{suggest(str(kind), get_args(Kind))}"
    hooks = HOOKS[cls.kind]
    if _overrides(cls, *hooks):
        return ""
    own = [name for base in cls.__mro__ if base not in Transform.__mro__ for name in vars(base)]
    near = [match for hook in hooks for match in difflib.get_close_matches(hook, own, n=1)]
    hint = f" It defines {near[0]!r}: rename that." if near else ""
    what = "the property" if isinstance(getattr(Transform, hooks[0]), property) else "the method"
    return (
        f"{cls.__name__} is a transform of kind {cls.kind!r} and must define {what} "
        f"{' or '.join(map(repr, hooks))} (see drivetrain.transforms.Transform.{hooks[0]}); without it, the transform "
        f"does nothing.{hint}"
    )


def declares_length(transform: Transform) -> bool:
    """Whether the class declares `depends_on_length` and no subclass has overridden a length hook since.

    Example::

        >>> declares_length(MixUp())
        True
    """
    for cls in type(transform).__mro__:
        if "depends_on_length" in vars(cls):
            return cls is not Transform
        own = (value for name, value in vars(cls).items() if not name.startswith("__"))
        if any(isinstance(v, property | classmethod | staticmethod) or inspect.isroutine(v) for v in own):
            return False
    return False


def follows_length(transform: Transform) -> bool:
    """Whether a longer training would change its steps: as the class declares, True if undeclared.

    Example::

        >>> follows_length(MixUp()), follows_length(ProgressiveResizing())
        (False, True)
    """
    if declares_length(transform):
        return bool(transform.depends_on_length)
    safe: Any = vars(Transform)["depends_on_length"]
    return bool(safe.fget(transform))


class NothingChanged(UserWarning):
    """A surgery found nothing to change; the message names what it looks for and what the model contains."""


def warn_nothing_changed(report: Report, looks_for: str, model: nn.Module, *, stacklevel: int = 3) -> None:
    """Emit `NothingChanged` at the line that called `apply`: `stacklevel` is 3 if that calls this directly, one more
    for each function in between. `looks_for` completes "it looks for …"."""
    counts = Counter(type(module).__name__ for module in model.modules() if not any(module.children()))
    has = ", ".join(f"{count} {name}" for name, count in counts.most_common(8))
    has += ", …" if len(counts) > 8 else ""
    reasons = "".join(f" Left alone: {name or '(the model)'}: {why}." for name, why in report.skipped[:3])
    reasons += f" And {len(report.skipped) - 3} more in report.skipped." if len(report.skipped) > 3 else ""
    warnings.warn(
        f"{report.transform} changed nothing: it looks for {looks_for}; "
        f"{type(model).__name__} is made of {has}.{reasons}",
        NothingChanged,
        stacklevel=stacklevel,
    )
