"""The training hooks of a run: what changes batches, gradients, weights and evaluation, in the plan's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ...loaders.epochs import EpochLoader
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
from ...transforms.common.tensors import buffers_kept
from ...transforms.gyro_dropout import GyroDropoutLayer
from ..spec.kinds import find
from ..telemetry.state import TrainState

Microbatch = tuple[torch.Tensor, torch.Tensor]
"""Images `(b, 3, H, W)` and targets, `(b,)` class numbers or `(b, C)` probabilities."""


def split_microbatches(images: torch.Tensor, labels: torch.Tensor, number: int) -> list[Microbatch]:
    """Split a batch into equal microbatches; into one without an operation."""
    if number == 1:
        return [(images, labels)]
    return list(zip(images.chunk(number), labels.chunk(number), strict=True))


class TrainingHooks:
    """What the transforms of one run do in the loop, on one rank. Without any, each hook does nothing.

    Args:
        transforms: of the pipeline, in the plan's order; of surgeries only `begin` is called, of losses nothing.
        seed: of the random numbers that mix batches.
        classes: their number, for soft targets.

    Attributes:
        state: the position of the run; `begin` makes a new one.
    """

    def __init__(self, transforms: Sequence[Transform], seed: int = 0, classes: int | None = None) -> None:
        self.state = TrainState()
        self._seed, self._classes, self._all = seed, classes, tuple(transforms)
        self._resizing = find(transforms, ProgressiveResizing)
        self._batch = [t for t in transforms if t.kind == "batch" and t is not self._resizing]
        self._sam, self._clipping = find(transforms, SAM), find(transforms, GradientClipping)
        self._freezing, self._flip = find(transforms, LayerFreezing), find(transforms, TestTimeFlip)
        self._loop = [t for t in transforms if t.kind == "loop"]
        self._sessions: list[Session] = []

    def begin(self, engine: Engine, total: int) -> None:
        """Start a training of so many steps, with the wrapped model's weights as they are now."""
        self.state = TrainState(total)
        for transform in self._all:
            transform.begin(engine.plain_model, total)
        self._sessions = [transform.session(engine.plain_model) for transform in self._loop]

    def note(self) -> str:
        """What to know as the training begins: an average that would hide what was learned. Or nothing.

        Said, not refused: the same recipe is right for more epochs, and trying it out for one is no fault.
        """
        average = find(self._loop, EMA)
        share = 0.0 if average is None else average.share_of_start(self.state.total_steps)
        if share < 0.1:
            return ""
        return (
            f"{average}: after all {self.state.total_steps} steps its average, which evaluation and the result take, "
            f"is still {share:.0%} the weights from before the training. Train longer, or choose a shorter half-life."
        )

    def begin_epoch(self, engine: Engine, loader: EpochLoader, image_size: int) -> None:
        """Sets what changes between epochs: the size the images are decoded at, and the frozen layers.

        An epoch has one size, that of its middle.
        """
        start = self.state.epoch_start  # in a run that resumes within the epoch, too
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

        Random numbers follow from (seed, step, number of the microbatch over all ranks), so that two ranks mix as
        one process does with twice the microbatches.
        """
        split = split_microbatches(images, labels, engine.accumulate)
        if not self._batch:
            return split
        first, apply = engine.rank * engine.accumulate, self.apply_batch_transforms
        with engine.forward_context():
            return [apply(one, first + n, engine.model, loss) for n, one in enumerate(split)]

    def apply_batch_transforms(
        self, microbatch: Microbatch, number: int, model: nn.Module, loss: Loss
    ) -> Microbatch:
        """Return microbatch `number`, counted over all ranks, mixed, cut or chosen; call it in the precision's
        context."""
        if not self._batch:
            return microbatch
        key = [self._seed, self.state.step, number]
        state = np.random.SeedSequence(key).generate_state(1, np.uint64)
        context = BatchContext(
            generator=torch.Generator().manual_seed(int(state[0])),
            progress=self.state.progress,
            classes=self._classes,
            model=model,
            loss=loss,
            step=self.state.step,
        )
        for transform in self._batch:
            microbatch = transform.batch(*microbatch, context)
        return microbatch

    def second_pass(self, engine: Engine, gradients: Callable[[], object]) -> None:
        """With SAM, compute the gradients again at the worst weights nearby, and restore the weights."""
        if self._sam is None or not self._sam.applies(self.state.step):
            return
        restore = self._sam.perturb(engine.plain_model.parameters())
        engine.zero_grad()
        with buffers_kept(engine.plain_model):  # BatchNorm's statistics count each image once
            gradients()
        restore()

    def clip(self, engine: Engine) -> None:
        """Bounds the gradients; the clipping by norm that `distribute` was told is the engine's own."""
        if self._clipping is not None:
            self._clipping.clip(engine.plain_model.parameters())

    def after_step(self, *, taken: bool = True) -> None:
        """Count the step, and add it to the averages unless the optimizer skipped it.

        The weights are then those of the step before: to average them once more would count them twice.
        """
        self.state.step += 1
        if taken:
            for session in self._sessions:
                session.after_step(self.state.progress)

    def finish(self) -> None:
        """Ends the training: the model keeps the weights that are evaluated."""
        for session in self._sessions:
            session.finish()

    def state_dict(self, engine: Engine) -> dict[str, Any]:
        """What a checkpoint needs beside the position: JSON values and tensors (not copied, perhaps parts)."""
        counts = {name: layer.step for name, layer in _counting(engine)}
        return {"counts": counts, **{_key(t): s.state_dict() for t, s in self._with_sessions()}}

    def load_state_dict(self, engine: Engine, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave, with whole tensors, after `begin`."""
        for name, layer in _counting(engine):
            layer.step, layer.masks = state["counts"][name], None  # the masks follow from the count
        for transform, session in self._with_sessions():
            session.load_state_dict(state[_key(transform)])

    def _with_sessions(self) -> Iterator[tuple[Transform, Session]]:
        return zip(self._loop, self._sessions, strict=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside it the model has the weights that are evaluated and kept (EMA, SWA)."""
        with ExitStack() as stack:
            for session in self._sessions:
                stack.enter_context(session.evaluating())
            yield

    def predict(self, model: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> torch.Tensor:
        """Logits `(B, C)` of images `(B, 3, H, W)`, as evaluation counts them."""
        return model(images) if self._flip is None else self._flip.predict(model, images)


def _key(transform: Transform) -> str:
    return type(transform).__name__  # once in a pipeline: the plan sees to it


def _counting(engine: Engine) -> Iterator[tuple[str, GyroDropoutLayer]]:
    """The layers that count their batches."""
    for name, module in engine.plain_model.named_modules():
        if isinstance(module, GyroDropoutLayer):
            yield name, module
