"""What a transform is: a frozen dataclass that declares facts about itself and does one thing.

The plan (`pipeline/spec/plan.py`) alone knows the rules of order; a transform only declares the facts the
rules need. Every transform also works alone, in anybody's loop.
"""

from __future__ import annotations

import difflib
import html
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from ..errors import PlanError, suggest
from ..table import Table

Kind = Literal[
    "image", "surgery", "memory_format", "optimizer", "batch", "loss", "schedule", "loop", "evaluation"
]
CHANGES_MODEL: tuple[Kind, ...] = ("surgery", "memory_format")
"""The kinds that change the model, by `apply`, before it is wrapped."""
LENGTH_HOOKS = ("begin", "batch", "session")
"""The methods of a transform that get the length of the training, or the share of it that is done."""
State = dict[str, torch.Tensor]
"""A state dict: parameters and persistent buffers by name."""
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A loss: logits `(B, C)` and targets, `(B,)` class indices or `(B, C)` probabilities, to a scalar."""
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]
"""Builds an optimizer over parameters (or parameter groups): `lambda params: SGD(params, lr=0.1)`."""


@dataclass(frozen=True)
class Report:
    """What a transform changed, by module name, and what it could not.

    Attributes:
        transform: the transform's class name.
        changed: names of the modules that were changed, in model order; `""` is the model itself.
        skipped: `(module name, reason)` of each candidate that was left as it was.
        notes: anything else a user should know, one sentence each.
    """

    transform: str
    changed: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.transform}: changed {len(self.changed)} module(s)"]
        if self.changed:
            lines.append("  changed: " + ", ".join(name or "(the model)" for name in self.changed))
        lines += [f"  left alone: {name or '(the model)'}: {reason}" for name, reason in self.skipped]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [("changed", name or "(the model)", "") for name in self.changed]
        rows += [("left alone", name or "(the model)", reason) for name, reason in self.skipped]
        rows += [("note", "", note) for note in self.notes]
        title = f"<b>{html.escape(self.transform)}</b>: changed {len(self.changed)} module(s)"
        return title + Table((), rows).html() if rows else title


@dataclass(frozen=True)
class BatchContext:
    """What a batch method may know besides the batch.

    Attributes:
        generator: on the CPU, seeded by the caller for this microbatch: all randomness comes from it.
        progress: share of the training that is done, 0 to 1.
        classes: width of soft targets made from class indices; None where targets are soft already.
        model: for SelectiveBackprop: images to logits (B, C).
        loss: for SelectiveBackprop: the loss of the training.
        step: for SelectiveBackprop: optimizer steps done so far, from 0.
    """

    generator: torch.Generator
    progress: float = 0.0
    classes: int | None = None
    model: Callable[[torch.Tensor], torch.Tensor] | None = None
    loss: Loss | None = None
    step: int | None = None


class Session:
    """What a loop method keeps during one training. The defaults do nothing."""

    def after_step(self, progress: float) -> None:
        """To be called after every optimizer step that was taken; `progress` is the share of the training done, 0 to 1.

        Not after a step that the loss scale of fp16 skipped: its weights have been counted already.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Inside it the model has the weights to evaluate; on leaving, those to train, bit for bit."""
        return nullcontext()

    def finish(self) -> None:
        """To be called once, at the end: the model keeps the weights to evaluate."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: tensors (not copied) and JSON values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave."""


@dataclass(frozen=True)
class Transform:
    """Base of all transforms: the facts that the plan reads, with the harmless answer as the default.

    A subclass sets the class variables and overrides the one hook of its kind:
    `loader_settings` for image, `apply` for surgery and memory format, `loss` for loss, `batch`, `optimizer`,
    and `session` for loop. A schedule or an evaluation has a method of its own, which the loop calls.
    """

    kind: ClassVar[Kind]
    source: ClassVar[str]
    """The publication the method comes from."""
    renames: ClassVar[bool] = False
    """Whether parameter names in the state dict change."""
    after: ClassVar[tuple[str, ...]] = ()
    """Class names of transforms that must stand before this one, and why is in the class docstring."""
    compile_safe: ClassVar[bool] = True
    """Whether the changed model compiles whole, with `torch.compile(fullgraph=True)`."""
    unsafe_with: ClassVar[tuple[str, ...]] = ()
    """Families of strategies ("ddp", "fsdp", "deepspeed", "fairscale") that it cannot be used with, and why
    is in the class docstring."""
    unused_parameters: ClassVar[bool] = False
    """Whether some step leaves a parameter without a gradient, so that DDP needs find_unused_parameters."""

    @property
    def depends_on_length(self) -> bool:
        """Whether a step of the training is another one if the training is longer: a checkpoint then cannot be
        resumed with another number of epochs.

        A class that overrides `begin`, `batch` or `session`, which get the length or the share that is done, declares
        it: a property, since settings may decide, or a class variable. Where it does not, the answer is yes. A
        subclass that overrides a method declares it again: see `declares_length`.
        """
        return self.kind == "schedule" or any(
            getattr(type(self), hook) is not getattr(Transform, hook) for hook in LENGTH_HOOKS
        )

    @property
    def loader_settings(self) -> dict[str, Any]:
        """Settings of the training loader, which does the work on each image."""
        return {}

    def apply(self, model: nn.Module) -> Report:  # noqa: ARG002
        """Changes `model` in place and reports what changed."""
        if self.kind in CHANGES_MODEL:
            raise PlanError(missing_hook(type(self)))
        raise TypeError(f"{type(self).__name__} does not change the model; it is a {self.kind} transform")

    def begin(self, model: nn.Module, total_steps: int) -> None:
        """For a surgery: to be called with the changed model before a training of so many optimizer steps."""

    def from_plain(self, state: State, model: nn.Module) -> State:  # noqa: ARG002
        """A state dict of the plain model as one that the changed model loads; a new dict.

        With several surgeries, in the order in which they were applied. Loading the plain weights before
        the surgery, or their translation after it, gives the same model. Entries that are in the changed
        form already stay as they are.

        Args:
            state: names and tensors of the plain model.
            model: the changed model; only its structure is read, unless the class says otherwise.
        """
        return dict(state)

    def to_plain(self, state: State, model: nn.Module) -> State:  # noqa: ARG002
        """A state dict of the changed model under the plain model's names; a new dict.

        With several surgeries, in the reverse order. Where the plain model can express the function, it
        gives the same output with the result; where it cannot, the docstring of the class says what the
        result holds.

        Args:
            state: names and tensors of the changed model.
            model: the changed model; only its structure is read.
        """
        return dict(state)

    def loss(self, loss: Loss) -> Loss:
        """The loss to train with, made from `loss`. Evaluation keeps the original."""
        return loss

    def batch(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        context: BatchContext,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch to train on, made from this one, which is not written to."""
        return images, targets

    def optimizer(self, factory: OptimizerFactory) -> OptimizerFactory:
        """The factory to build the optimizer with, made from `factory`."""
        return factory

    def session(self, model: nn.Module) -> Session:  # noqa: ARG002
        """Begins to follow a training of `model`, once it is on its device, sharded and loaded."""
        return Session()


HOOKS: dict[Kind, str] = {
    "image": "loader_settings",
    "surgery": "apply",
    "memory_format": "apply",
    "optimizer": "optimizer",
    "batch": "batch",
    "loss": "loss",
    "loop": "session",
}
"""What a class of each kind must define. What a schedule or an evaluation does, the loop knows of each by its class."""


def missing_hook(cls: type[Transform]) -> str:
    """What a class does not define and must, with the remedy; "" where nothing is missing."""
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
        f"drivetrain.transforms.Transform.{hook}), or it would do nothing.{hint}"
    )


def declares_length(transform: Transform) -> bool:
    """Whether its class declares `depends_on_length`, and no subclass has changed a method since."""
    for cls in type(transform).__mro__:
        if "depends_on_length" in vars(cls):
            return cls is not Transform
        own = (value for name, value in vars(cls).items() if not name.startswith("__"))
        if any(isinstance(v, property | classmethod | staticmethod) or inspect.isroutine(v) for v in own):
            return False
    return False


def follows_length(transform: Transform) -> bool:
    """Whether a longer training would change its steps: as its class declares, else what is safe."""
    if declares_length(transform):
        return bool(transform.depends_on_length)
    safe: Any = vars(Transform)["depends_on_length"]
    return bool(safe.fget(transform))


class NothingChanged(UserWarning):
    """A surgery found nothing to do; the message lists what it looks for and what the model has."""


def warn_nothing_changed(report: Report, looks_for: str, model: nn.Module, *, stacklevel: int = 3) -> None:
    """Emits `NothingChanged` at the line that called `apply`.

    Args:
        report: the report about to be returned; the reasons in `skipped` go into the message.
        looks_for: what the transform can change, completing "it looks for …".
        model: the model that has none of it.
        stacklevel: 3 if `apply` calls this directly, one more for each function between.
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
