"""The training hooks of a run: apply transforms to batches, gradients, weights and evaluation, in the plan's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ...common.model_state import buffers_kept
from ...loaders.epochs import EpochLoader
from ...loaders.image_size import ImageSize
from ...strategies import Engine
from ...transforms import (
    EMA,
    SAM,
    BatchContext,
    GradientClipping,
    LayerFreezing,
    Loss,
    ProgressiveResizing,
    Session,
    TestTimeFlip,
    Transform,
)
from ...transforms.gyro_dropout import GyroDropoutLayer
from ..describe.kinds import find
from ..tasks.nests import to_float
from ..tasks.task import Task, TaskLoss, loss_and_metric_inputs
from ..telemetry.state import TrainState
from .events import LoopEvents, loop_view

Microbatch = tuple[torch.Tensor, torch.Tensor]
"""Images `(b, 3, H, W)` and targets: class indices `(b,)` or probabilities `(b, C)`."""


def split_microbatches(images: torch.Tensor, labels: torch.Tensor, number: int) -> list[Microbatch]:
    """Split a batch into `number` microbatches, whose sizes differ by at most 1; one is the batch itself."""
    if number == 1:
        return [(images, labels)]
    return list(zip(images.tensor_split(number), labels.tensor_split(number), strict=True))


class TrainingHooks:
    """What a run's transforms do in the training loop, on one rank. Without transforms, each hook does nothing.

    Args:
        transforms: the pipeline's transforms in the plan's order; only `begin` is called of those that change the model
            or the loss.
        seed: seed of the batch transforms.
        classes: number of classes, for soft targets.
        precision: of the forward.

    Attributes:
        state: the position of the run; `begin` resets it.
        events: the moments of the loop, for transforms that follow it; `begin` creates them.
        equal_shares: whether every rank's share of a batch is known to have equally many samples.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        seed: int = 0,
        classes: int | None = None,
        precision: str = "fp32",
    ) -> None:
        self.state, self.events = TrainState(), LoopEvents()
        self.equal_shares = False
        self._precision = precision
        self._seed, self._classes, self._all = seed, classes, tuple(transforms)
        self._resizing = find(transforms, ProgressiveResizing)
        self._batch = [t for t in transforms if t.kind == "batch" and t is not self._resizing]
        self._sam, self._clipping = find(transforms, SAM), find(transforms, GradientClipping)
        self._freezing, self._flip = find(transforms, LayerFreezing), find(transforms, TestTimeFlip)
        self._loop = [t for t in transforms if t.kind in ("loop", "algorithm")]
        self._sessions: list[Session] = []

    def begin(self, engine: Engine, total: int, loader: EpochLoader | None = None) -> None:
        """Start a run of `total` steps from the wrapped model's current weights. `loader` is that of the training."""
        self.state = TrainState(total)
        for transform in self._all:
            transform.begin(engine.plain_model, total)
        self._sessions = [transform.session(engine.plain_model) for transform in self._loop]
        self.equal_shares = loader is not None
        following = [session for session in self._sessions if type(session).at is not Session.at]
        if following:
            view = loop_view(engine, total, loader, self._seed, self._precision)
            self.events = LoopEvents(following, view, self.state, engine.accumulate)
            self.equal_shares = False  # a session may change the batch

    def note(self) -> str:
        """Return a warning if the averaged weights would mostly be those from before training; else "".

        It is not an error: the same recipe is fine for more epochs, and one epoch is a legitimate trial.
        """
        average = find(self._loop, EMA)
        share = 0.0 if average is None else average.share_of_start(self.state.total_steps)
        if share < 0.1:
            return ""
        return (
            f"{average}: after all {self.state.total_steps} steps its average, which evaluation and the result use, "
            f"still consists of {share:.0%} initial weights. Train longer, or set a shorter half-life."
        )

    def begin_epoch(self, engine: Engine, loader: EpochLoader, image_size: ImageSize) -> None:
        """Set what changes between epochs: the image size and the frozen layers.

        An epoch has one image size, that of its midpoint.
        """
        start = self.state.epoch_start  # also if the run resumes within the epoch
        if self._resizing is not None:
            size = self._resizing.size(image_size, self.state.progress_at(start + len(loader) / 2))
            if size != loader.settings.image_size:
                loader.set_image_size(size)
        if self._freezing is not None:
            self._freezing.freeze(engine.plain_model, self.state.progress_at(start))

    def microbatches(
        self, engine: Engine, images: torch.Tensor, labels: torch.Tensor, loss: Loss
    ) -> list[Microbatch]:
        """Split this rank's batch into `engine.accumulate` microbatches, and apply the batch transforms to each.

        Random numbers depend on (seed, step, index of the microbatch over all ranks), so two ranks mix like one process
        with twice the microbatches.
        """
        images, labels = self.events.begin_step(images, labels, loss)
        split = split_microbatches(images, labels, engine.accumulate)
        if not self._batch:
            return split
        first, apply = engine.rank * engine.accumulate, self.apply_batch_transforms
        with engine.forward_context():
            return [
                apply(one, first + n, engine.model, loss) if len(one[0]) else one
                for n, one in enumerate(split)
            ]

    def apply_batch_transforms(
        self, microbatch: Microbatch, number: int, model: nn.Module, loss: Loss
    ) -> Microbatch:
        """Apply the batch transforms to microbatch `number`, counted over all ranks; call it in the forward context."""
        if not self._batch:
            return microbatch
        key = [self._seed, self.state.step, number]
        state = np.random.SeedSequence(key).generate_state(1, np.uint64)
        context = BatchContext(
            generator=torch.Generator().manual_seed(int(state[0])),
            progress=self.state.progress,
            classes=self._classes,
            model=model,
            loss=loss.base if isinstance(loss, TaskLoss) else loss,
            step=self.state.step,
        )
        for transform in self._batch:
            microbatch = transform.batch(*microbatch, context)
        return microbatch

    def second_pass(self, engine: Engine, gradients: Callable[[], object]) -> None:
        """With SAM, recompute the gradients at the perturbed weights, and restore the weights."""
        if self._sam is None or not self._sam.applies(self.state.step):
            return
        restore = self._sam.perturb(engine.plain_model.parameters())
        engine.zero_grad()
        with buffers_kept(engine.plain_model):  # each image updates BatchNorm's statistics once
            gradients()
        restore()

    def clip(self, engine: Engine) -> None:
        """Clip the gradients with `GradientClipping`; the engine applies `clip_norm` of `distribute` itself."""
        self.events.at("after_train_batch")
        if self._clipping is not None:
            self._clipping.clip(engine.plain_model.parameters())

    def after_step(self, *, taken: bool = True) -> None:
        """Count the step. Unless the optimizer skipped it, update the sessions, such as weight averages.

        A skipped step leaves the previous weights, which would otherwise be averaged twice.
        """
        self.state.step += 1
        if taken:
            for session in self._sessions:
                session.after_step(self.state.progress)
        self.events.at("batch_end")

    def finish(self) -> None:
        """End training: the model keeps the weights used in evaluation."""
        self.events.at("fit_end")
        for session in self._sessions:
            session.finish()

    def state_dict(self, engine: Engine) -> dict[str, Any]:
        """Return the state apart from the position: JSON values and tensors (not copied; sharded if the model is)."""
        counts = {name: layer.step for name, layer in _counting(engine)}
        return {"counts": counts, **{_key(t): s.state_dict() for t, s in self._with_sessions()}}

    def load_state_dict(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, with full tensors; call it after `begin`."""
        for name, layer in _counting(engine):
            layer.step, layer.masks = state["counts"][name], None  # the masks depend on the count
        for transform, session in self._with_sessions():
            session.load_state_dict(state[_key(transform)])

    def _with_sessions(self) -> Iterator[tuple[Transform, Session]]:
        return zip(self._loop, self._sessions, strict=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the model the weights used in evaluation and in the result (EMA, SWA) inside the block."""
        with ExitStack() as stack:
            for session in self._sessions:
                stack.enter_context(session.evaluating())
            yield

    def predict(
        self, model: Callable[..., Any], images: torch.Tensor, targets: torch.Tensor, task: Task
    ) -> tuple[Any, Any]:
        """Return the model's outputs for images `(B, 3, H, W)` in evaluation, in float32: those for the loss, and those
        for the metrics. With TestTimeFlip, both are one tensor."""
        inputs = task.model_inputs(targets)
        if self._flip is None:
            return loss_and_metric_inputs(task, model(images, **inputs))
        averaged = to_float(self._flip.predict(lambda seen: task.outputs(model(seen, **inputs)), images))
        return averaged, averaged


def _key(transform: Transform) -> str:
    return type(transform).__name__  # unique in a pipeline: the plan checks it


def _counting(engine: Engine) -> Iterator[tuple[str, GyroDropoutLayer]]:
    """Yield the layers that count their batches, with their names."""
    for name, module in engine.plain_model.named_modules():
        if isinstance(module, GyroDropoutLayer):
            yield name, module
