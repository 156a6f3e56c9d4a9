"""The moments of the training loop: what transforms, observers and Composer's algorithms can follow, and what they see.

A step passes: `on_step_start`; for each microbatch `before_forward`, `after_forward`, `before_loss`, `before_backward`
and `after_backward`; `should_step`, `after_gradients`, `should_apply`, `before_step`, `on_optimizer_step`,
`after_step`, `on_step_end`. Epochs: `before_epoch`, `on_epoch_start` and `after_epoch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...common.errors import PlanError


class LoopEngine(Protocol):
    """What a session may use of the strategy's engine; see `drivetrain.strategies.Engine`."""

    model: nn.Module  # with the strategy's wrapper
    optimizer: torch.optim.Optimizer
    device: torch.device
    rank: int
    world_size: int
    accumulate: int

    @property
    def plain_model(self) -> nn.Module: ...

    @property
    def sharded(self) -> bool: ...

    def forward_context(self) -> AbstractContextManager[Any]: ...

    def zero_grad(self) -> None: ...

    def reduce(self, value: Tensor, op: Literal["mean", "sum"] = "mean") -> Tensor: ...


def outside_of_a_step() -> None:
    raise PlanError("Loop.gradients: there is no step. Call it in after_gradients.")


@dataclass
class Loop:
    """The training loop on one rank at a moment: where the run is, and what the step has computed so far.

    Attributes:
        total_steps: optimizer steps of the full run, with all samples in every epoch.
        epoch: finished epochs.
        step: completed optimizer steps, including skipped ones.
        engine: the model, the optimizer, and what is known of the ranks.
        seed, precision: of the run; the precision is `"fp32"`, `"bf16"` or `"fp16"`.
        steps_per_epoch: optimizer steps of an epoch with all samples.
        epoch_steps: optimizer steps of the current epoch; fewer, if the loader leaves out samples (`EpochLoader.keep`).
        steps_left_out: steps by which all earlier epochs were shorter.
        loader: the training loader; None in a custom loop that does not pass it.
        image_size: the side, or height and width, of training images at full size.
        sessions: all sessions of the run, in the plan's order.
        batch: `(images, targets)` of this rank at `on_step_start`, of a microbatch from `before_forward` to
            `after_backward`. May be replaced at `on_step_start` and `before_forward`.
        loss_function: the training loss, of outputs and targets.
        outputs: what the model returned for a microbatch; from `before_loss` on in float32, and may be replaced there.
        weights: factors of the losses of a microbatch's samples, `(b,)`; None: 1. May be set at `before_loss`. The mean
            still divides by what it divides by without them.
        losses: the losses of a microbatch's samples without these factors, `(b,)`, at `before_backward` if `weights`
            were set; else None.
        loss: the mean over a microbatch, a scalar; may be replaced at `before_backward`.
        microbatch: the number of the microbatch over all ranks; outside of microbatches, the rank.
        gradients: computes the gradients of this step again, and adds them: call `engine.zero_grad()` first.
        step_loss: the mean over the microbatches of this rank, `()`, on the device.
        step_images: images of the step, over all ranks.
        norm: of the gradients, as `Engine.step` returned it.
        overflowed: whether the optimizer skipped the step, because gradients overflowed in fp16.

    Example::

        >>> class Watch(Session):
        ...     def on_step_end(self, loop: Loop) -> None:
        ...         print(loop.step, float(loop.step_loss))
    """

    total_steps: int = 1
    epoch: int = 0
    step: int = 0
    engine: LoopEngine = field(init=False, repr=False)
    seed: int = 0
    precision: str = "fp32"
    steps_per_epoch: int = 1
    epoch_steps: int = 1
    steps_left_out: int = 0
    loader: Any = field(default=None, repr=False)
    image_size: int | tuple[int, int] = 0
    sessions: tuple[Session, ...] = field(default=(), repr=False)
    batch: Any = field(default=None, repr=False)
    loss_function: Callable[..., Tensor] | None = field(default=None, repr=False)
    outputs: Any = field(default=None, repr=False)
    weights: Tensor | None = field(default=None, repr=False)
    losses: Tensor | None = field(default=None, repr=False)
    loss: Any = field(default=None, repr=False)
    microbatch: int = 0
    gradients: Callable[[], Any] = field(default=outside_of_a_step, repr=False)
    step_loss: Tensor = field(init=False, repr=False)
    step_images: int = 0
    norm: Tensor | None = field(default=None, repr=False)
    overflowed: bool = False

    @property
    def step_in_epoch(self) -> int:
        """Completed steps of the current epoch."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """Images of a batch, over all ranks; 0 without a loader."""
        return 0 if self.loader is None else int(self.loader.settings.batch_size)

    @property
    def progress(self) -> float:
        """The completed fraction of training, 0 to 1."""
        return self.progress_at(self.position)

    @property
    def position(self) -> float:
        """Where the run is, 0 to `total_steps`: `step`, if every epoch has all samples; of a shorter epoch, each step
        counts for more, so that all epochs count the same. Learning rate and `progress` follow it."""
        return self.epoch_start + self.step_in_epoch * self.steps_per_epoch / self.epoch_steps

    @property
    def epoch_start(self) -> int:
        """The position at the start of the current epoch."""
        return self.step - self.step_in_epoch + self.steps_left_out

    def progress_at(self, position: float) -> float:
        """Return the fraction of training, 0 to 1, completed at a position from 0 to `total_steps`."""
        return min(position / max(self.total_steps, 1), 1.0)

    def forward(self, images: Tensor) -> Any:
        """Return the outputs of the wrapped model, in float32."""
        raise NotImplementedError


View = TypeVar("View", bound=Loop)


class Follower(Generic[View]):
    """The moments of the loop. Every rank reaches the same ones in the same order."""

    def on_epoch_start(self, loop: View) -> None:
        """Called before the first step of an epoch, also after resuming within one (`loop.step_in_epoch` > 0)."""

    def on_step_start(self, loop: View) -> None:
        """Called with this rank's batch, before it is split into microbatches. May replace `loop.batch`."""

    def before_forward(self, loop: View) -> None:
        """Called before the forward of a microbatch. May replace `loop.batch`."""

    def after_forward(self, loop: View) -> None:
        """Called after the forward of a microbatch."""

    def before_loss(self, loop: View) -> None:
        """Called before the loss of a microbatch. May replace `loop.outputs` and `loop.batch`, whose targets count."""

    def before_backward(self, loop: View) -> None:
        """Called before the backward of a microbatch. May replace `loop.loss`."""

    def after_backward(self, loop: View) -> None:
        """Called after the backward of a microbatch."""

    def should_step(self, loop: View) -> bool:  # noqa: ARG002
        """Return whether the optimizer may step with `loop.step_loss`; must be the same on every rank."""
        return True

    def after_gradients(self, loop: View) -> None:
        """Called with the gradients of the step, averaged over the ranks. May compute others: see `loop.gradients`."""

    def should_apply(self, loop: View) -> bool:  # noqa: ARG002
        """Return whether the optimizer may step with the gradients; must be the same on every rank."""
        return True

    def before_step(self, loop: View) -> None:
        """Called before the optimizer's step. May change the gradients in place."""

    def on_optimizer_step(self, loop: View) -> None:
        """Called after the optimizer's step, before it counts: `loop.step` is still that before it."""

    def on_step_end(self, loop: View) -> None:
        """Called after each step, also a skipped one."""

    def calls(self, moment: str) -> Iterator[Callable[[Any], Any]]:
        """Yield what the loop calls at a moment: the method of that name, if it is overridden."""
        if getattr(type(self), moment) is not getattr(Follower, moment):
            yield getattr(self, moment)


class Session(Follower[Loop]):
    """A transform during one training run, on one rank: override the moments that it follows; each does nothing.

    Example::

        >>> session = EMA(half_life=100).session(model)
        >>> session.after_step(progress=0.1)  # after each optimizer step
        >>> with session.evaluating():
        ...     logits = model(images)
        >>> session.finish()
    """

    def before_epoch(self, loop: Loop) -> None:
        """Called before an epoch's data is loaded, also of one that is resumed: set what stays the same within it, such
        as the size of the images (`loop.loader.set_image_size`) or the frozen layers."""

    def after_step(self, progress: float) -> None:
        """Update the state after an optimizer step; `progress` is the fraction of training completed, 0 to 1.

        Do not call it after a step that fp16's loss scaling skipped: those weights were already counted.
        """

    def after_epoch(self, loop: Loop) -> None:
        """Called after the last step of an epoch, which counts already."""

    def on_fit_end(self, loop: Loop) -> None:
        """Called after the last epoch, before `finish`."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its evaluation weights; exit restores the training ones exactly."""
        return nullcontext()

    def finish(self) -> None:
        """Leave the evaluation weights in the model. Call it once, at the end."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: JSON values, and dicts of tensors (not copied) by name. Those of a class
        that overrides `evaluating` are the weights to evaluate, where they have names of parameters and buffers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""


def session_at(**moments: Callable[[Loop], object]) -> Session:
    """Return a session without a state, which calls each function at the moment of its name."""
    session: Session = type("Session", (Session,), {name: staticmethod(call) for name, call in moments.items()})()
    return session


def least_share(epochs: int) -> float:
    """Return a share of so many epochs whose end has the middle of the last one in it, with four digits, rounded up:
    rounded down, as a remedy in an error it would lead to the same error."""
    return math.ceil(0.5 / epochs * 1e4) / 1e4
