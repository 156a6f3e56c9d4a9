"""The calls at each moment of the training loop, and the hooks that apply transforms in the plan's order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from itertools import accumulate
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import nn

from ...common.errors import PlanError
from ...common.model_state import buffers_kept
from ...loaders.epochs import EpochLoader
from ...loaders.image_size import ImageSize
from ...strategies import Engine
from ...transforms import BatchContext, Loss, Session, Transform
from ...transforms.base import is_own
from ..tasks.nests import labels_of, select_samples, to_float
from ..tasks.task import Task, TaskLoss, loss_and_metric_inputs
from ..telemetry.observer import Observer
from ..telemetry.state import TrainState

Microbatch = tuple[torch.Tensor, Any]
"""Images `(b, 3, H, W)` and targets: class indices `(b,)` or probabilities `(b, C)`; see `nests.pair`."""
Calls = tuple[Callable[[TrainState], Any], ...]
OF_MICROBATCHES = ("before_forward", "after_forward", "before_loss", "before_backward", "after_backward")
OBSERVED_FIRST = ("on_epoch_start", "on_step_start", "after_forward", "after_backward")


class Moments:
    """The calls at each moment (`transforms.common.moments`): sessions in the plan's order, then the observer; before
    them where time or a batch begins, or a forward or backward has ended, so that its phases contain what they name."""

    on_epoch_start: Calls
    on_step_start: Calls
    before_forward: Calls
    after_forward: Calls
    before_loss: Calls
    before_backward: Calls
    after_backward: Calls
    should_step: Calls
    after_gradients: Calls
    should_apply: Calls
    before_step: Calls
    on_optimizer_step: Calls
    on_step_end: Calls

    def __init__(self, sessions: Sequence[Session], observer: Observer) -> None:
        # Otherwise the state does not keep their tensors.
        self.microbatches_followed = any([*session.calls(moment)] for session in sessions for moment in OF_MICROBATCHES)
        for moment in get_type_hints(type(self)):
            calls = [call for session in sessions for call in session.calls(moment)]
            seen = list(observer.calls(moment))
            setattr(self, moment, (*seen, *calls) if moment in OBSERVED_FIRST else (*calls, *seen))

    def batch(self, calls: Calls, state: TrainState, batch: Microbatch) -> Microbatch:
        state.batch = batch
        for call in calls:
            call(state)
        now = state.batch
        pair = tuple(now) if isinstance(now, tuple | list) else ()
        if len(pair) == 2 and isinstance(pair[0], torch.Tensor) and isinstance(pair[1], torch.Tensor | tuple):
            return pair[0], pair[1]
        raise PlanError(f"A transform set the batch to {now!r:.80}, which is not a pair of images and targets.")

    def loss(self, state: TrainState, loss: torch.Tensor) -> torch.Tensor:
        state.loss = loss
        for call in self.before_backward:
            call(state)
        if not isinstance(state.loss, torch.Tensor):
            raise PlanError(f"A transform set the loss to {state.loss!r:.80}, which is not a tensor.")
        return state.loss if state.loss.dim() == 0 else state.loss.mean()


def split_microbatches(images: torch.Tensor, targets: Any, number: int) -> list[Microbatch]:
    """The sizes differ by at most 1."""
    if number == 1:
        return [(images, targets)]
    split = images.tensor_split(number)
    ends = accumulate(map(len, split))
    return [(part, select_samples(targets, slice(end - len(part), end))) for part, end in zip(split, ends, strict=True)]


class TrainingHooks:
    """What a run's transforms do in the training loop, on one rank. Without transforms, each hook does nothing.

    Of `transforms` that change the model or the loss, only `begin` is called. `classes` are for soft targets. `state`
    is the position of the run, which `begin` resets; `equal_shares`: every rank's share of a batch is known to have
    equally many samples.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        seed: int = 0,
        classes: int | None = None,
        precision: str = "fp32",
    ) -> None:
        self.state, self.equal_shares = TrainState(), False
        self.calibrate: Callable[[int], None] = _nothing  # sets BatchNorm's statistics
        self._seed, self._classes, self._precision, self._all = seed, classes, precision, tuple(transforms)
        # The loader does the work of those that set the size of its images.
        self._batch = [t for t in transforms if t.kind == "batch" and type(t).size is Transform.size]
        self._of_loader = [t for t in transforms if t.prunes_samples or type(t).size is not Transform.size]
        self._evaluates = any(t.kind == "evaluation" for t in transforms)
        self._sessions: dict[str, Session] = {}
        self._moments = self.moments(Observer())

    def moments(self, observer: Observer) -> Moments:
        return Moments(tuple(self._sessions.values()), observer)

    def begin(self, engine: Engine, total: int, loader: EpochLoader | None = None) -> None:
        """Start a run of `total` steps from the wrapped model's current weights."""
        for transform in self._all:
            transform.begin(engine.plain_model, total)
        # A class is unique in a pipeline: the plan checks it.
        own = [transform for transform in self._all if type(transform).session is not Transform.session]
        self._sessions = {type(each).__name__: each.session(engine.plain_model) for each in own}
        if (session := getattr(engine.optimizer, "session", None)) is not None:  # as Schedule-Free's
            name = type(engine.optimizer).__name__
            self._sessions[name] = session(engine.plain_model, lambda: self.calibrate(self.state.epoch))
        self.state = state = TrainState(total, seed=self._seed, precision=self._precision, loader=loader)
        state.engine, state.sessions = engine, tuple(self._sessions.values())
        state.steps_per_epoch = total if loader is None else max(loader.full_length, 1)
        state.epoch_steps = total if loader is None else max(len(loader), 1)
        self._moments = self.moments(Observer())
        self.equal_shares = loader is not None and not self.may_change_batches

    @property
    def may_change_batches(self) -> bool:
        """Whether ranks may train on different numbers of samples. Drivetrain's own transforms keep equally many."""
        custom = any(not t.keeps_samples and not is_own(type(t).batch) for t in self._batch)
        return custom or bool(self._moments.on_step_start or self._moments.before_forward)

    def note(self) -> str:
        return next(filter(None, (transform.note(self.state.total_steps) for transform in self._all)), "")

    def begin_epoch(self, loader: EpochLoader, image_size: ImageSize) -> None:
        """Set what changes between epochs, also if the run resumes within one. Raise `PlanError` if a
        transform sets what the loader loads, and `loader` is none of Drivetrain's."""
        if self._of_loader and not isinstance(loader, EpochLoader):
            raise PlanError(
                f"{self._of_loader[0]} sets what the loader loads, but {type(loader).__name__} is none of "
                "Drivetrain's. Pass an FFCVLoader or a TorchLoader to begin_epoch, or use the methods that its "
                "documentation names."
            )
        state = self.state
        state.loader, state.image_size = loader, image_size
        full = loader.full_length if isinstance(loader, EpochLoader) else len(loader)
        state.steps_per_epoch = max(full, 1)
        for session in state.sessions:
            session.before_epoch(state)
        state.epoch_steps = max(len(loader), 1)

    def microbatches(
        self,
        engine: Engine,
        images: torch.Tensor,
        labels: Any,
        loss: Loss,
        moments: Moments | None = None,
    ) -> list[Microbatch]:
        """Split this rank's batch into `engine.accumulate` microbatches, and apply the batch transforms to each. Random
        numbers depend on (seed, step, index over all ranks), so two ranks mix like one process with twice as many."""
        moments, own = moments or self._moments, images
        self.state.loss_function, self.state.microbatch = loss, engine.rank
        if moments.on_step_start:
            images, labels = moments.batch(moments.on_step_start, self.state, (images, labels))
            if images is not own and len(images) % engine.accumulate:
                raise PlanError(
                    f"A transform changed the batch to {len(images)} images, which cannot be split into "
                    f"accumulate={engine.accumulate} equal microbatches. Set accumulate=1, or leave it out."
                )
        split = split_microbatches(images, labels, engine.accumulate)
        if not self._batch:
            return split
        first, apply = engine.rank * engine.accumulate, self.apply_batch_transforms
        with engine.forward_context():
            return [
                apply(part, number, engine.model, loss) if len(part[0]) else part
                for number, part in enumerate(split, first)
            ]

    def apply_batch_transforms(self, microbatch: Microbatch, number: int, model: nn.Module, loss: Loss) -> Microbatch:
        """`number` counts over all ranks; call it in the forward context."""
        if not self._batch:
            return microbatch

        def outputs(images: torch.Tensor) -> Any:
            with buffers_kept(model):
                return loss.task.outputs(model(images)) if isinstance(loss, TaskLoss) else model(images)

        key = [self._seed, self.state.step, number]
        state = np.random.SeedSequence(key).generate_state(1, np.uint64)
        context = BatchContext(
            generator=torch.Generator().manual_seed(int(state[0])),
            progress=self.state.progress,
            classes=self._classes,
            model=outputs,
            loss=loss.base if isinstance(loss, TaskLoss) else loss,
            step=self.state.step,
        )
        images, targets = microbatch
        for transform in self._batch:  # of the labels alone: those that mix them are rejected with further fields
            images, labels = transform.batch(images, labels_of(targets), context)
            targets = (labels, *targets[1:]) if isinstance(targets, tuple) else labels
        return images, targets

    def before_step(self, gradients: Callable[[], object]) -> None:
        """Change the gradients (SAM, clipping), in a loop of your own; `gradients` computes those of the step again."""
        self.state.gradients = gradients
        for call in (*self._moments.after_gradients, *self._moments.before_step):
            call(self.state)

    def after_step(self, *, taken: bool = True) -> None:
        """Count the step; unless the optimizer skipped it, update the averages, which would count weights twice."""
        self.state.step += 1
        if taken:
            for session in self.state.sessions:
                session.after_step(self.state.progress)

    def finish(self) -> None:
        for session in self.state.sessions:
            session.on_fit_end(self.state)
            session.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values and tensors (not copied; sharded if the model is), by class name of the transform."""
        own = {name: each for name, each in self._sessions.items() if _overrides(each, "state_dict")}
        # "counts" were those of GyroDropout before it had a session; earlier versions require the entry.
        return {"counts": {}, **{name: session.state_dict() for name, session in own.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With full tensors; call it after `begin`."""
        for name, session in self._sessions.items():
            if name in state:
                session.load_state_dict(state[name])
            elif _overrides(session, "load_state_dict"):
                session.load_state_dict(state["counts"])

    def sets_weights(self, method: str) -> bool:
        """Whether a session in `state_dict` sets the weights to evaluate, which its tensors of their names then are."""
        return method in self._sessions and _overrides(self._sessions[method], "evaluating")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the model the weights used in evaluation (EMA, SWA) inside the block."""
        with ExitStack() as stack:
            for session in self.state.sessions:
                stack.enter_context(session.evaluating())
            yield

    def predict(self, model: Callable[..., Any], images: torch.Tensor, targets: Any, task: Task) -> tuple[Any, Any]:
        """Return float32 outputs for images `(B, 3, H, W)`, for the loss and for the metrics."""
        inputs = task.model_inputs(targets)
        if not self._evaluates:
            return loss_and_metric_inputs(task, model(images, **inputs))

        def outputs(seen: torch.Tensor) -> Any:
            return task.outputs(model(seen, **inputs))

        judged = to_float(evaluated_outputs(self._all, outputs)(images))
        return judged, judged


def _nothing(epoch: int) -> None:
    """Unlike a lambda, it can be sent to processes that Lightning spawns."""


def evaluated_outputs(
    transforms: Sequence[Transform], outputs: Callable[[torch.Tensor], Any]
) -> Callable[[torch.Tensor], Any]:
    """Return what gives a batch's outputs in evaluation: `outputs`, within the evaluation transforms."""
    evaluation = [each for each in transforms if each.kind == "evaluation"]
    return reduce(lambda inner, each: partial(each.predict, inner), evaluation, outputs)


def _overrides(session: Session, method: str) -> bool:
    return getattr(type(session), method) is not getattr(Session, method)
