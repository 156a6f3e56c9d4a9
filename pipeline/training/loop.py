"""The loop: one epoch of training, and one evaluation. Every strategy and every variant runs this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
import torch.nn.functional as F

from ...loaders.epochs import Batch
from ...strategies import Engine
from ...strategies.devices import current_device
from ...transforms import Loss
from ..telemetry.meter import Sums
from .guard import Unguarded
from .hooks import Methods, Microbatch

Watch = Callable[[int, torch.Tensor], None]
"""Called after each step with the number of images (all ranks) and the step's loss, still on the device."""


@dataclass(frozen=True)
class EpochStats:
    """Of one epoch: mean loss over all ranks, images (all ranks), seconds, seconds spent waiting for data, steps
    that were skipped because their loss was not finite, and those because fp16's gradients overflowed."""

    loss: float
    images: int
    seconds: float
    waited: float
    skipped: int = 0
    overflowed: int = 0


def train_epoch(
    engine: Engine,
    batches: Iterable[Batch],
    loss: Loss,
    before_step: Callable[[], None] | None = None,
    watch: Watch | None = None,
    methods: Methods | None = None,
    sums: Sums | None = None,
    guard: Unguarded | None = None,
) -> EpochStats:
    """Trains on each batch once.

    Args:
        engine: the model, made by a strategy.
        batches: `(images (B, 3, H, W), labels (B,))`; B divides by `engine.accumulate`.
        loss: logits and labels to a scalar, the mean over the batch.
        before_step: called before each optimizer step; sets the learning rate.
        watch: called after each step.
        methods: what changes batches, gradients and weights; None: nothing does.
        sums: those of the epoch's batches before these; None: there were none. Is kept up to date.
        guard: looks at each loss; None: nobody does.
    """
    methods, guard = methods or Methods(()), guard or Unguarded()
    sums = sums or Sums(torch.zeros((), device=engine.device))
    engine.model.train()
    waiting, start, before = Stopwatch(), perf_counter(), (sums.seconds, sums.waited)
    with current_device(engine.device):
        for images, labels in waiting.around(batches):
            guard.begin()
            parts = methods.microbatches(engine, images, labels, loss)
            step_loss = add_gradients(engine, parts, loss)
            if before_step is not None:
                before_step()
            admitted = guard.admits(step_loss)
            if admitted:
                methods.refine(engine, partial(add_gradients, engine, parts, loss))
                methods.clip(engine)
                guard.check_step(engine.step(), engine.skipped)
                sums.total += step_loss
                sums.counted += 1
                sums.overflowed += engine.skipped
            else:
                engine.zero()
                sums.skipped += 1
            methods.after_step(taken=admitted and not engine.skipped)
            sums.images += len(images) * engine.world_size
            sums.seconds, sums.waited = before[0] + perf_counter() - start, before[1] + waiting.seconds
            if watch is not None:
                watch(len(images) * engine.world_size, step_loss)
        guard.flush()
    mean = engine.reduce(sums.total / max(sums.counted, 1)).item()
    seconds = before[0] + perf_counter() - start
    return EpochStats(mean, sums.images, seconds, sums.waited, sums.skipped, sums.overflowed)


def add_gradients(engine: Engine, parts: list[Microbatch], loss: Loss) -> torch.Tensor:
    """Forward and backward of each microbatch; the mean of their losses, still on the device."""
    losses = []
    for number, (images, targets) in enumerate(parts, 1):
        with engine.forward_context():
            logits = engine.model(images)
        value = loss(logits.float(), targets)
        engine.backward(value, last_microbatch=number == len(parts))
        losses.append(value.detach())
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


@torch.no_grad()
def evaluate(engine: Engine, batches: Iterable[Batch], methods: Methods | None = None) -> tuple[float, float]:
    """Mean cross entropy and top-1 accuracy (0 to 1) over all samples of all ranks.

    Args:
        engine: the model, made by a strategy.
        batches: `(images (B, 3, H, W), labels (B,))`.
        methods: how an image is predicted; None: by the model alone. Which weights count is the caller's:
            `with methods.evaluating()`.
    """
    methods = methods or Methods(())
    engine.model.eval()
    sums = torch.zeros(3, device=engine.device, dtype=torch.float64)
    with current_device(engine.device):
        for images, labels in batches:
            if len(images) == 0:
                # This rank's share of a small last batch. Shards are gathered on all ranks or none.
                engine.plain_model(images.new_zeros(1, *images.shape[1:]))
                continue
            with engine.forward_context():
                logits = methods.predict(engine.plain_model, images)
            logits = logits.float()
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(1) == labels).sum()
            sums[2] += len(labels)
    loss, correct, count = engine.reduce(sums, "sum").tolist()
    return loss / count, correct / count


class Stopwatch:
    """Adds up the time that a loop waits for its iterable."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, with the wait for each one counted."""
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
