"""The training loop: one epoch, and one evaluation. Every strategy and every variant of the ledger runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ...loaders.epochs import Batch
from ...strategies import Engine
from ...strategies.devices import current_device
from ..tasks.classification import Classification
from ..tasks.metrics import compute
from ..tasks.nests import to_float
from ..tasks.task import LossFunction, Task, model_inputs
from ..telemetry.observer import Observer
from .events import LoopEvents
from .hooks import Microbatch, TrainingHooks
from .schedule import Schedule
from .views import forward


@dataclass(frozen=True)
class EpochStats:
    """Statistics of one epoch.

    Attributes:
        loss: mean over steps and ranks.
        images: images of all ranks.
        seconds: duration.
        data_wait_s: seconds spent waiting for data.
        skipped: steps skipped because their loss was not finite.
        overflowed: steps skipped because their gradients overflowed in fp16.
    """

    loss: float
    images: int
    seconds: float
    data_wait_s: float
    skipped: int = 0
    overflowed: int = 0


def train_epoch(
    engine: Engine,
    batches: Iterable[Batch],
    loss: LossFunction,
    hooks: TrainingHooks | None = None,
    schedule: Schedule | None = None,
    observer: Observer | None = None,
) -> EpochStats:
    """Train on each batch once, or until an observer sets `TrainState.stop`.

    Args:
        engine: the model and its optimizer, from a strategy.
        batches: `(images (B, 3, H, W), labels (B,) or (B, K))`; B is divisible by `engine.accumulate`. Of images
            `(B, V, 3, H, W)`, the model receives all views as one batch, and the loss outputs `(B, V, …)`.
        loss: maps the model's outputs, in float32, and labels to a scalar, the mean over the batch. A `TaskLoss` may
            also give the labels to the model.
        hooks: transforms of batches, gradients and weights, with the run's position. Default None: no transforms.
        schedule: sets the learning rate of each step. Default None: it does not change.
        observer: follows the epoch, and may veto steps. Default None: none.

    Example::

        >>> engine = strategies.get("single").prepare(model, lambda params: torch.optim.SGD(params, lr=0.1))
        >>> loader = FFCVLoader("train.beton", batch_size=16, image_size=32)
        >>> stats = train_epoch(engine, loader, nn.functional.cross_entropy)
    """
    hooks, observer = hooks or TrainingHooks(()), observer or Observer()
    state, meter = hooks.state, hooks.state.begin_epoch(engine.device)
    engine.model.train()
    waiting, start, before = Stopwatch(), perf_counter(), (meter.seconds, meter.data_wait_s)
    evaluated = meter.evaluation_s
    observer.on_epoch_start(state)
    with current_device(engine.device):
        hooks.events.begin_epoch()
        for images, labels in waiting.around(batches):
            observer.on_step_start(state)
            observer.on_phase("forward")
            microbatches = hooks.microbatches(engine, images, labels, loss)
            step_loss = add_gradients(engine, microbatches, loss, observer, hooks.events)
            if schedule is not None:
                state.lr = schedule.set_lr(state.step)
            admitted = observer.should_step(state, step_loss)
            if admitted:
                again = partial(add_gradients, engine, microbatches, loss, observer, hooks.events)
                hooks.second_pass(engine, again)
                admitted = observer.should_apply(state)
            if admitted:
                hooks.clip(engine)
                observer.on_phase("step")
                norm = engine.step()
                observer.on_phase("other")
                observer.on_optimizer_step(state, norm, engine.skipped)
                meter.total += step_loss
                meter.counted += 1
                meter.overflowed += engine.skipped
            else:
                engine.zero_grad()
                meter.skipped += 1
            hooks.after_step(taken=admitted and not engine.skipped)
            meter.images += len(images) * engine.world_size
            meter.seconds = before[0] + perf_counter() - start - (meter.evaluation_s - evaluated)
            meter.data_wait_s = before[1] + waiting.seconds
            observer.on_step_end(state, step_loss, len(images) * engine.world_size)
            if state.stop is not None:
                break
        observer.flush()
    mean = engine.reduce(meter.total / max(meter.counted, 1)).item()
    seconds = before[0] + perf_counter() - start - (meter.evaluation_s - evaluated)
    if state.stop is None:
        state.end_epoch()
        hooks.events.at("epoch_end")
    return EpochStats(mean, meter.images, seconds, meter.data_wait_s, meter.skipped, meter.overflowed)


def add_gradients(
    engine: Engine,
    microbatches: list[Microbatch],
    loss: LossFunction,
    observer: Observer,
    events: LoopEvents,
) -> torch.Tensor:
    """Run forward and backward of each microbatch. Return their mean loss, on the device."""
    losses = []
    for number, (images, targets) in enumerate(microbatches, 1):
        images, targets = events.before_forward(images, targets, number)
        observer.on_phase("forward")
        with engine.forward_context():
            outputs = forward(engine.model, images, **model_inputs(loss, targets))
        observer.on_phase("other")
        outputs, targets = events.before_loss(to_float(outputs), targets)
        value = events.before_backward(loss(outputs, targets))
        observer.on_phase("backward")
        engine.backward(value, last_microbatch=number == len(microbatches))
        observer.on_phase("other")
        events.at("after_backward")
        losses.append(value.detach())
    events.end_microbatches()
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


@torch.no_grad()
def evaluate(
    engine: Engine, batches: Iterable[Batch], hooks: TrainingHooks | None = None, task: Task | None = None
) -> dict[str, float]:
    """Return `val_loss`, the task's mean loss without transforms, and its metrics, over all samples of all ranks.

    Args:
        engine: the model, from a strategy.
        batches: `(images (B, 3, H, W), labels (B,) or (B, K))`.
        hooks: predict the outputs. Default None: the model's forward. To evaluate averaged weights, call this inside
            `with hooks.evaluating()`.
        task: the loss and the metrics. Default None: `Classification()`, i.e. cross entropy, top-1 and top-5 accuracy
            (0 to 1).

    Example::

        >>> engine = strategies.get("single").prepare(model, lambda params: torch.optim.SGD(params, lr=0.1))
        >>> loader = FFCVLoader("val.beton", batch_size=16, image_size=32, train=False)
        >>> sorted(evaluate(engine, loader))
        ['top1', 'val_loss']
    """
    hooks, task = hooks or TrainingHooks(()), task or Classification()
    engine.model.eval()
    criterion, meters = task.move(engine.device), dict[str, Any]()
    sums = torch.zeros(2, device=engine.device, dtype=torch.float64)

    with current_device(engine.device):
        for number, (images, labels) in enumerate(batches):
            empty = len(images) == 0
            if empty:
                # This rank has no share of a small last batch, but gathering sharded parameters needs all ranks.
                images, labels = (each.new_zeros(1, *each.shape[1:]) for each in (images, labels))
            with engine.forward_context():
                judged, outputs = hooks.predict(engine.plain_model, images, labels, task)
            if number == 0:
                meters = task.meters(_width(outputs))
                for meter in meters.values():
                    meter.to(engine.device)
            if empty:
                continue
            sums[0] += criterion(judged, labels) * len(labels)
            sums[1] += len(labels)
            targets = task.metric_targets(labels)
            for meter in meters.values():
                meter.update(outputs, targets)
    loss, count = engine.reduce(sums, "sum").tolist()
    return {"val_loss": loss / count, **compute(meters, engine.world_size)}


def _width(outputs: Any) -> int | None:
    """Return the number of values per image, if the outputs are one tensor."""
    if not isinstance(outputs, torch.Tensor):
        return None
    return outputs.shape[1] if outputs.dim() > 1 else 1


class Stopwatch:
    """Accumulate the time that a loop waits for its iterable."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, timing the wait for each."""
        iterator = iter(batches)
        while True:
            start = perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += perf_counter() - start
            yield batch
