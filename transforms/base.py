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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from ..common.errors import PlanError, first_of, suggest
from ..common.table import Table
from .common.moments import LoopView, Moment

Kind = Literal[
    "image", "surgery", "algorithm", "memory_format", "optimizer", "batch", "loss", "schedule", "loop",
    "evaluation",
]  # fmt: skip
CHANGES_MODEL: tuple[Kind, ...] = ("surgery", "algorithm", "memory_format")
"""The kinds whose `apply` changes the model, before it is wrapped."""
SHOWN = 4
"""Module names of a list in a report's text."""
LENGTH_HOOKS = ("begin", "batch", "session")
"""The methods that receive the length of the training, or the fraction completed."""
State = dict[str, torch.Tensor]
"""A state dict: parameters and persistent buffers by name."""
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A loss: maps logits `(B, C)` and targets, `(B,)` class indices or `(B, C)` probabilities, to a scalar."""
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""Builds an optimizer over parameters (or parameter groups): `lambda params: SGD(params, lr=0.1)`."""


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
    """Return a list of module names, shortened unless `verbose`."""
    names = [name or "(the model)" for name in modules]
    return first_of(names, len(names) if verbose or len(names) == SHOWN + 1 else SHOWN)


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
    model: Callable[[torch.Tensor], torch.Tensor] | None = None
    loss: Loss | None = None
    step: int | None = None


class Session:
    """The state of a loop transform during one training run. The defaults do nothing.

    Example::

        >>> session = EMA(half_life=100).session(model)
        >>> session.after_step(progress=0.1)  # after each optimizer step
        >>> with session.evaluating():
        ...     logits = model(images)
        >>> session.finish()
    """

    def after_step(self, progress: float) -> None:
        """Update the state after an optimizer step; `progress` is the fraction of training completed, 0 to 1.

        Do not call it after a step that fp16's loss scaling skipped: those weights were already counted.
        """

    def at(self, moment: Moment, loop: LoopView) -> None:
        """Called at every moment of the loop. May change the batch, the outputs and the loss."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its evaluation weights; exit restores the training ones exactly."""
        return nullcontext()

    def finish(self) -> None:
        """Leave the evaluation weights in the model. Call it once, at the end."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tensors (not copied) and JSON values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""


@dataclass(frozen=True)
class Transform:
    """Base of all transforms: the facts the plan reads, with safe defaults.

    A subclass sets the class variables and overrides the one hook of its kind: `loader_settings` for image,
    `apply` for surgery and memory format, `loss` for loss, `batch`, `optimizer`, and `session` for loop. A
    schedule or evaluation transform has its own method, which the training loop calls. The kind algorithm is that
    of `from_composer`, with both `apply` and `session`.

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
    after: ClassVar[tuple[str, ...]] = ()
    """Class names of transforms that must run before this one; the class docstring explains why."""
    compile_safe: ClassVar[bool] = True
    """Whether the changed model compiles without graph breaks, with `torch.compile(fullgraph=True)`."""
    unsafe_with: ClassVar[tuple[str, ...]] = ()
    """Families of strategies ("ddp", "fsdp", "deepspeed", "fairscale") it cannot be used with; the class
    docstring explains why."""
    targets: ClassVar[tuple[str, ...] | None] = None
    """The kinds of targets it can be used with, of "class indices", "labels", "values" and "masks" (see
    `pipeline.tasks`); None: all, because it does not use them."""
    soft_targets: ClassVar[bool] = False
    """Whether it turns class indices into probabilities, before the loss."""
    unused_parameters: ClassVar[bool] = False
    """Whether some steps leave a parameter without a gradient, so that DDP needs find_unused_parameters."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the steps depend on the total length of training. If so, a checkpoint cannot be resumed with a
        different number of epochs.

        A class that overrides `begin`, `batch` or `session`, which receive the length or the fraction completed,
        must declare it: as a property, if settings decide, or as a class variable. Without a declaration, the
        answer is True. A subclass that overrides one of these methods must declare it again: see
        `declares_length`.
        """
        return self.kind == "schedule" or any(
            getattr(type(self), hook) is not getattr(Transform, hook) for hook in LENGTH_HOOKS
        )

    @property
    def known_as(self) -> str:
        """The name of its method; a pipeline takes one transform of each."""
        return type(self).__name__

    @property
    def unknown(self) -> bool:
        """Whether it may change batches, outputs or the loss in ways that it does not declare."""
        return False

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
        """Translate a plain model's state dict for the changed model; returns a new dict.

        With several surgeries, call it in the order they were applied. Loading plain weights before the surgery,
        or their translation after it, results in the same model. Entries already in the changed form are kept.

        Args:
            state: names and tensors of the plain model.
            model: the changed model; only its structure is read, unless the class documents otherwise.
        """
        return dict(state)

    def to_plain(self, state: State, model: nn.Module) -> State:  # noqa: ARG002
        """Translate the changed model's state dict for the plain model; returns a new dict.

        With several surgeries, call it in reverse order. If the plain model can express the function, it
        produces the same output with the result; otherwise the class docstring describes the result.

        Args:
            state: names and tensors of the changed model.
            model: the changed model; only its structure is read.
        """
        return dict(state)

    def loss(self, loss: Loss) -> Loss:
        """Return the training loss, made from `loss`. Evaluation keeps the original."""
        return loss

    def batch(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        context: BatchContext,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch to train on. The inputs are not modified."""
        return images, targets

    def optimizer(self, factory: OptimizerFactory) -> OptimizerFactory:
        """Return the factory that builds the optimizer, made from `factory`."""
        return factory

    def session(self, model: nn.Module) -> Session:  # noqa: ARG002
        """Start tracking a training run of `model`, after it is moved to its device, sharded and loaded."""
        return Session()


HOOKS: dict[Kind, str] = {
    "image": "loader_settings",
    "surgery": "apply",
    "algorithm": "session",
    "memory_format": "apply",
    "optimizer": "optimizer",
    "batch": "batch",
    "loss": "loss",
    "loop": "session",
}
"""The hook a class of each kind must define. The loop handles schedules and evaluations by class."""


def missing_hook(cls: type[Transform]) -> str:
    """Return an error message about the hook that `cls` lacks, with the remedy; "" if it lacks none."""
    kind: object = getattr(cls, "kind", None)
    if kind not in get_args(Kind):
        return f"{cls.__name__} has kind={kind!r}; it must declare one.{suggest(str(kind), get_args(Kind))}"
    hook = HOOKS.get(cls.kind)
    if hook is None or getattr(cls, hook) is not getattr(Transform, hook):
        return ""
    own = [name for base in cls.__mro__ if base not in Transform.__mro__ for name in vars(base)]
    near = difflib.get_close_matches(hook, own, n=1)
    hint = f" It defines {near[0]!r}: rename that." if near else ""
    what = "the property" if isinstance(getattr(Transform, hook), property) else "the method"
    return (
        f"{cls.__name__} is a transform of kind {cls.kind!r} and must define {what} {hook!r} (see "
        f"drivetrain.transforms.Transform.{hook}); without it, the transform does nothing.{hint}"
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
    """Emit `NothingChanged` at the line that called `apply`.

    Args:
        report: the report about to be returned; its `skipped` reasons become part of the message.
        looks_for: what the transform can change, completing "it looks for …".
        model: the model, which has no such module.
        stacklevel: 3 if `apply` calls this directly, one more for each function in between.
    """
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


__all__ = [
    "BatchContext",
    "Kind",
    "Loss",
    "NothingChanged",
    "OptimizerFactory",
    "Report",
    "Session",
    "State",
    "Transform",
    "declares_length",
    "follows_length",
    "warn_nothing_changed",
]
