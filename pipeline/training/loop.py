"""The training loop, one mean over the microbatches of all ranks; every strategy and variant of the ledger runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isclose
from time import perf_counter
from typing import Any, Literal, Protocol

import torch

from ...common.errors import DataError, PlanError
from ...common.model_state import train_mode
from ...loaders.epochs import Batch, EpochLoader
from ...strategies import Engine
from ...strategies.common.sync_batch_norm import absent
from ...strategies.devices import current_device
from ...transforms.common.moments import outside_of_a_step
from ..tasks.means import Count, LossFunction, Mean, mean_of, samples
from ..tasks.metrics import compute
from ..tasks.nests import map_tensors, pair, to_float
from ..tasks.standard import Classification
from ..tasks.task import Task, model_inputs, update_metric
from ..telemetry.observer import Observer
from ..telemetry.state import EpochMeter, TrainState
from .hooks import Microbatch, Moments, TrainingHooks
from .schedule import Schedule


def forward(model: Callable[..., Any], images: torch.Tensor, **inputs: torch.Tensor) -> Any:
    """Of views `(B, V, 3, H, W)`, outputs are `(B, V, …)`: all are one batch, for BatchNorm's statistics."""
    if images.dim() != 5:  # also of another kind of data, in a loop of one's own
        return model(images, **inputs)
    shape = images.shape[:2]
    outputs = model(images.flatten(0, 1), **inputs)
    return map_tensors(lambda output: output.view(*shape, *output.shape[1:]), outputs)


class Ranks(Protocol):
    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def reduce(self, value: torch.Tensor, op: Literal["mean", "sum"] = "mean") -> torch.Tensor: ...


class StepLoss:
    """The mean loss of a step, in shares whose mean over microbatches and ranks it is: Σ numerators / Σ denominators;
    0, with zero gradients, if all denominators are. Engines divide each share by the number of microbatches, and
    average gradients over ranks. If all denominators are known to be equal (`equal`: the samples of all ranks are
    equally many), a share is the mean of its microbatch, and nothing is exchanged; otherwise the ranks sum one number,
    on their devices. `weight`, the sum of all denominators, is the step's in an epoch's mean."""

    def __init__(self, mean: Mean, microbatches: Sequence[Microbatch], ranks: Ranks, *, equal: bool) -> None:
        self.mean = mean
        self._counts = [mean.denominator(targets) for _, targets in microbatches]
        if _reads_are_free(ranks):
            read: list[Count] = [float(count) for count in self._counts]
            self._counts = read if all(count > 0 for count in read) else self._counts
        self._scale: Count | None = None
        shares = len(self._counts) * ranks.world_size
        numbers = [count for count in self._counts if not isinstance(count, torch.Tensor)]
        # Of further fields, as boxes, each rank may have another number.
        varies = mean.denominator is not samples and any(isinstance(targets, tuple) for _, targets in microbatches)
        if len(numbers) == len(self._counts) and ((equal and not varies) or ranks.world_size == 1):
            self.weight: Count = sum(numbers) * ranks.world_size
            if len(set(numbers)) > 1 or not numbers[0]:
                self._scale = shares / (self.weight or 1)
            return
        total = torch.stack([_on(ranks.device, count) for count in self._counts]).sum()
        self.weight = total if ranks.world_size == 1 else ranks.reduce(total, "sum")
        self._scale = shares / torch.where(self.weight > 0, self.weight, 1)

    def check(self, number: int, before: Any, after: Any) -> None:
        """Reject targets that a transform has set after the denominators were counted, if theirs is another one."""
        if after is before or self.mean.denominator is samples:
            return
        if not isclose(self.mean.denominator(after), self._counts[number - 1], rel_tol=1e-4):
            raise PlanError(
                "A transform replaced the targets of a microbatch, but the loss weights or ignores targets, so that "
                "its mean would depend on how a batch is split. Replace them in on_step_start (Composer's "
                "Event.BATCH_START), or use a loss that does neither."
            )

    def share(self, number: int, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """`number` counts the microbatches of this rank from 1."""
        if self._scale is None:
            return self.mean.loss(outputs, targets)
        return self.mean.numerator(outputs, targets, self._counts[number - 1]) * self._scale

    def weighted(
        self, number: int, outputs: Any, targets: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the share with each sample's loss times its weight `(b,)`, whose mean divides by the same; and these
        losses, without weights and gradients."""
        losses = self.mean.of_samples(outputs, targets)
        total = (losses * weights).sum()
        share = total / self._counts[number - 1] if self._scale is None else total * self._scale
        return share, losses.detach()


def _reads_are_free(ranks: Ranks) -> bool:
    """Whether reading a denominator waits for nothing; it saves operations."""
    return ranks.world_size == 1 and ranks.device.type == "cpu"


def _on(device: torch.device, count: Count) -> torch.Tensor:
    """A number is filled in, because a copy to the device could wait for it."""
    return count.detach() if isinstance(count, torch.Tensor) else torch.full((), count, device=device)


@dataclass(frozen=True)
class EpochStats:
    """Statistics of one epoch."""

    loss: float  # mean over all samples, of the loss at their step; with class weights, the weighted mean
    images: int  # of all ranks
    seconds: float
    data_wait_s: float
    skipped: int = 0  # steps whose loss was not finite
    overflowed: int = 0  # steps whose gradients overflowed in fp16


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
        batches: `(images (B, 3, H, W), labels (B,) or (B, K))`, this rank's share of each batch; shares may differ in
            size. Of images `(B, V, 3, H, W)`, the model receives all views as one batch, and the loss outputs
            `(B, V, …)`. If more follows the labels, as with `FFCVLoader(fields=…)`, the loss receives all of it as a
            tuple.
        loss: maps the model's outputs, in float32, and labels to a scalar, the mean over the batch. Numerators and
            denominators are summed over microbatches and ranks (`means.mean_of`): those of torch's losses with class
            weights or ignored labels, and of a loss with an attribute `denominator`. A `TaskLoss` may also give the
            labels to the model.
        hooks: transforms of batches, gradients and weights, with the run's position. Default None: no transforms.
        schedule: sets the learning rate of each step. Default None: it does not change.
        observer: follows the epoch, and may veto steps. Default None: none.

    Example::

        >>> engine = strategies.get("single").prepare(model, lambda params: torch.optim.SGD(params, lr=0.1))
        >>> loader = FFCVLoader("train.beton", batch_size=16, image_size=32)
        >>> stats = train_epoch(engine, loader, nn.functional.cross_entropy)
    """
    hooks, observer = hooks or TrainingHooks(()), observer or Observer()
    state, meter, moments = hooks.state, hooks.state.begin_epoch(engine.device), hooks.moments(observer)
    train_mode(engine.model)
    start = perf_counter() - meter.seconds - meter.evaluation_s
    earlier, own = meter.images, 0
    even = isinstance(batches, EpochLoader) and batches.settings.train  # in evaluation, the last batch may be uneven
    # A loader may be another one than that with which the run has begun.
    equal = even and not hooks.may_change_batches if isinstance(batches, EpochLoader) else hooks.equal_shares
    mean = mean_of(loss)
    with current_device(engine.device):
        for call in moments.on_epoch_start:
            call(state)
        for images, labels in map(pair, _timed(batches, meter)):
            microbatches = hooks.microbatches(engine, images, labels, loss, moments)
            step = StepLoss(mean, microbatches, engine, equal=equal)
            state.gradients = partial(add_gradients, engine, microbatches, step, state, moments)
            state.step_loss = step_loss = state.gradients()
            if schedule is not None:
                state.lr = schedule.set_lr(state.position)
            taken = _optimizer_step(engine, state, moments)
            if taken:
                meter.add(step_loss, step.weight, overflowed=engine.skipped)
            else:
                engine.zero_grad()
                meter.skipped += 1
            hooks.after_step(taken=taken and not engine.skipped)
            state.step_images = len(images) * engine.world_size
            meter.images += state.step_images
            own += len(images)
            meter.seconds = perf_counter() - start - meter.evaluation_s
            for call in moments.on_step_end:
                call(state)
            if state.stop is not None:
                break
        observer.flush()
    state.gradients = outside_of_a_step  # frees the batch
    if engine.world_size > 1 and not even:  # each rank knows the size of its own shares
        meter.images = earlier + int(engine.reduce(torch.tensor(own, dtype=torch.float64), "sum").item())
    epoch_loss = engine.reduce(meter.mean()).item()
    meter.seconds = seconds = perf_counter() - start - meter.evaluation_s
    if state.stop is None:
        state.end_epoch()
        for session in state.sessions:
            session.after_epoch(state)
    return EpochStats(epoch_loss, meter.images, seconds, meter.data_wait_s, meter.skipped, meter.overflowed)


def _optimizer_step(engine: Engine, state: TrainState, moments: Moments) -> bool:
    """Unless an observer vetoes it: all are asked, since they answer with the other ranks."""
    answers = [call(state) for call in moments.should_step]
    if not all(answers):
        return False
    for call in moments.after_gradients:
        call(state)
    answers = [call(state) for call in moments.should_apply]
    if not all(answers):
        return False
    for call in moments.before_step:
        call(state)
    state.norm, state.overflowed = engine.step(), engine.skipped
    for call in moments.on_optimizer_step:
        call(state)
    return True


def add_gradients(
    engine: Engine, microbatches: list[Microbatch], step: StepLoss, state: TrainState, moments: Moments
) -> torch.Tensor:
    """Run forward and backward of each microbatch; return the mean of their shares of the loss, on the device."""
    losses, whole, followed = [], state.batch, moments.microbatches_followed
    for number, (images, targets) in enumerate(microbatches, 1):
        last = number == len(microbatches)
        if not len(images):
            losses.append(_take_part(engine, images, model_inputs(step.mean.loss, targets), last=last))
            continue
        state.microbatch, counted = engine.rank * engine.accumulate + number - 1, targets
        if followed or moments.before_forward:
            images, targets = moments.batch(moments.before_forward, state, (images, targets))
        with engine.forward_context():
            outputs = forward(engine.model, images, **model_inputs(step.mean.loss, targets))
        if followed:
            state.outputs = outputs
        for call in moments.after_forward:
            call(state)
        outputs = to_float(outputs)
        if followed or moments.before_loss:
            state.outputs = outputs
            images, targets = moments.batch(moments.before_loss, state, (images, targets))
            outputs = state.outputs
        step.check(number, counted, targets)
        weights, state.weights, state.losses = state.weights, None, None
        if weights is None:
            value = step.share(number, outputs, targets)
        else:
            value, state.losses = step.weighted(number, outputs, targets, weights)
        if moments.before_backward:
            value = moments.loss(state, value)
        engine.backward(value, last_microbatch=last)
        for call in moments.after_backward:
            call(state)
        losses.append(value.detach())
    state.batch, state.microbatch = whole, engine.rank
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


def _take_part(engine: Engine, images: torch.Tensor, inputs: dict[str, torch.Tensor], *, last: bool) -> torch.Tensor:
    """Run forward and backward without images, as the other ranks wait for this one; return 0."""
    one = images.new_zeros(1, *images.shape[1:])
    given = {name: value.new_zeros(1, *value.shape[1:]) for name, value in inputs.items()}
    with absent(engine.plain_model):  # its statistics stay; the backward may run modules again (recomputation)
        with engine.forward_context():
            outputs = forward(engine.model, one, **given)
        parts: list[torch.Tensor] = []
        map_tensors(parts.append, to_float(outputs))
        nothing = torch.stack([part.sum() for part in parts if part.requires_grad]).sum() * 0
        engine.backward(nothing, last_microbatch=last)
    return nothing.detach()


@torch.no_grad()
def evaluate(
    engine: Engine, batches: Iterable[Batch], hooks: TrainingHooks | None = None, task: Task | None = None
) -> dict[str, float]:
    """Return `val_loss`, the task's mean loss without transforms, and its metrics, over all samples of all ranks.

    `val_loss` is the sum of the numerators of all batches over the sum of their denominators, so it does not depend on
    the batch size. Before, each buffer that has a mean, as BatchNorm's statistics, gets that of all ranks.

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
    engine.sync_buffers()
    sums = evaluation_sums(engine, hooks or TrainingHooks(()), task or Classification())
    with current_device(engine.device):
        for images, labels in map(pair, batches):
            sums.add(images, labels)
    return sums.result()


def evaluation_sums(engine: Engine, hooks: TrainingHooks, task: Task) -> EvaluationSums:
    """Set the model to evaluation, and return its sums."""
    engine.model.eval()

    def predict(images: torch.Tensor, labels: Any) -> tuple[Any, Any]:
        with engine.forward_context():
            return hooks.predict(engine.plain_model, images, labels, task)

    return EvaluationSums(task, engine, predict)


class EvaluationSums:
    """A rank's sums of an evaluation; `predict` is that of `TrainingHooks`, of images and labels."""

    def __init__(self, task: Task, ranks: Ranks, predict: Callable[..., tuple[Any, Any]]) -> None:
        self._task, self._ranks, self._predict = task, ranks, predict
        self._mean, self._meters = task.mean(task.move(ranks.device)), dict[str, Any]()
        self._sums = torch.zeros(2, device=ranks.device, dtype=torch.float64)

    def add(self, images: torch.Tensor, labels: Any) -> tuple[Any, Any]:
        """Return what `predict` does. A rank may have no share of a small last batch, but gathering sharded parameters
        needs all ranks."""
        if empty := len(images) == 0:
            images, labels = map_tensors(lambda each: each.new_zeros(1, *each.shape[1:]), (images, labels))
        judged, outputs = self._predict(images, labels)
        if not self._meters:
            width = None  # values per image, if the outputs are one tensor
            if isinstance(outputs, torch.Tensor):
                width = outputs.shape[1] if outputs.dim() > 1 else 1
            meters = self._task.meters(width)
            self._meters = {name: meter.to(self._ranks.device) for name, meter in meters.items()}
        if empty:
            return judged, outputs
        count = self._mean.denominator(labels)
        self._sums[0] += self._mean.numerator(judged, labels, count)
        self._sums[1] += count
        targets = self._task.metric_targets(labels)
        for meter in self._meters.values():
            update_metric(self._task, meter, outputs, targets)
        return judged, outputs

    def result(self) -> dict[str, float]:
        numerator, denominator = self._ranks.reduce(self._sums, "sum").tolist()
        if not denominator:
            raise DataError(
                "val_loss: none of the validation data's targets counts, because all are ignored, or of classes of "
                "weight 0. Evaluate on other data, or change the loss."
            )
        return {"val_loss": numerator / denominator, **compute(self._meters, self._ranks.world_size)}


def _timed(batches: Iterable[Batch], meter: EpochMeter) -> Iterator[Batch]:
    iterator = iter(batches)
    while True:
        start = perf_counter()
        if (batch := next(iterator, None)) is None:
            return
        meter.data_wait_s += perf_counter() - start
        yield batch
