"""Judge every sample of the validation data once: the pass behind `FitResult.errors`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....loaders.epochs import EpochLoader
from ....strategies import Engine
from ....strategies.devices import current_device
from ....strategies.launching.group import of_all_ranks
from ...tasks.means import mean_of
from ...tasks.nests import labels_of, map_tensors, pair, select_samples
from ...tasks.standard import IGNORED, Segmentation
from ...tasks.task import StandardTask, Task, names_of
from ...training.hooks import TrainingHooks
from ...training.loop import evaluation_sums
from .errors import ClassErrors, Errors, LabelErrors, PixelErrors, ValueErrors

Arrays = dict[str, NDArray[Any]]
PICTURES = 24  # of the worst samples, and of the least certain ones


@dataclass
class Judged:
    """What a rank has judged so far: arrays of a row per sample, and sums over the samples."""

    rows: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    sums: Arrays = field(default_factory=dict)

    def add(self, rows: Arrays, sums: Arrays) -> None:
        for name, values in rows.items():
            self.rows.setdefault(name, []).append(values)
        for name, values in sums.items():
            self.sums[name] = self.sums[name] + values if name in self.sums else values

    def joined(self, ranks: int) -> tuple[Arrays, Arrays]:
        """Return the rows of all ranks, in the order of the samples, and the sums. Every rank must call it."""
        whole = Judged()
        for own in of_all_ranks(self, ranks):
            for name, parts in own.rows.items():
                whole.rows.setdefault(name, []).extend(parts)
            whole.add({}, own.sums)
        rows = {name: np.concatenate(parts) for name, parts in whole.rows.items()}
        order = np.argsort(rows["samples"], kind="stable")
        return {name: values[order] for name, values in rows.items()}, whole.sums


@dataclass
class Sheet:
    """The samples with the highest scores so far, with their pictures by name, the highest score first."""

    kept: list[tuple[float, int, Arrays]] = field(default_factory=list)

    def offer(self, scores: NDArray[Any], samples: NDArray[np.int64], pictures: Callable[[int], Arrays]) -> None:
        """Keep those of a batch whose scores are among the highest; `pictures(n)` is called for these only."""
        scores = np.nan_to_num(scores.astype(np.float64), nan=np.inf)
        least = self.kept[-1][0] if len(self.kept) == PICTURES else -np.inf
        for n in np.argsort(-scores, kind="stable")[:PICTURES].tolist():
            if scores[n] > least:
                self.kept.append((float(scores[n]), int(samples[n]), pictures(n)))
        self._cut()

    def joined(self, ranks: int) -> dict[int, Arrays]:
        """Return the pictures by sample, of all ranks. Every rank must call it."""
        self.kept = [one for kept in of_all_ranks(self.kept, ranks) for one in kept]
        self._cut()
        return {sample: pictures for _, sample, pictures in self.kept}

    def _cut(self) -> None:
        self.kept = sorted(self.kept, key=lambda one: (-one[0], one[1]))[:PICTURES]


@torch.no_grad()
def judge(engine: Engine, loader: EpochLoader, hooks: TrainingHooks, task: Task, source: str) -> Errors:
    """Evaluate on `source`, whose samples `loader` has in order, and keep what is known of each, with pictures of the
    worst and of the least certain. Every rank must call it; all return the whole."""
    sums, judged = evaluation_sums(engine, hooks, task), Judged()
    loss = task.move(engine.device)
    # Only of the standard tasks it is known what they predict for their kind of targets.
    made, of = KINDS.get(task.kind if isinstance(task, StandardTask) else "any", (Errors, _nothing))
    worst, unsure = Sheet(), Sheet()
    width, own = None, loader.settings
    with current_device(engine.device):
        for samples, (images, targets) in zip(loader.shares(0), map(pair, loader), strict=True):
            judged_by, outputs = sums.add(images, targets)
            width = outputs.shape[1] if isinstance(outputs, torch.Tensor) and outputs.dim() > 1 else 1
            if len(images) == 0:
                continue
            losses = _losses(task, loss, judged_by, outputs, targets)
            rows, totals, drawn, certainty = of(task, outputs, targets)
            judged.add({"samples": samples, "losses": losses, **rows}, totals)

            def picture(n: int, images: Any = images, drawn: Mapping[str, torch.Tensor] = drawn) -> Arrays:
                return {"image": shown(images[n], own.mean, own.std)} | {
                    k: each[n].cpu().numpy() for k, each in drawn.items()
                }

            worst.offer(losses, samples, picture)
            if certainty is not None:
                unsure.offer(-certainty, samples, picture)
    metrics = sums.result()
    each, total = judged.joined(engine.world_size)
    kept = unsure.joined(engine.world_size) | worst.joined(engine.world_size)
    count = task.classes if isinstance(task, Segmentation) else width or 1
    # Of masks, the last names may be those of values that do not count.
    named = loader.classes[:count] if task.kind == "masks" else loader.classes
    names = tuple(names_of(count, named))
    errors: Errors = made(source, metrics, names, **each, pictures=kept, colors=loader.colors, **total)
    return errors


def shown(image: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.uint8]:
    """Return a loaded image `(C, H, W)` as a picture, `(H, W, 3)`: normalization undone, one channel repeated."""
    if image.dtype != torch.uint8:
        middle, spread = (torch.tensor(each, device=image.device).view(-1, 1, 1) for each in (mean, std))
        image = ((image.float() * spread + middle) * 255).round().clamp(0, 255).to(torch.uint8)
    image = image[:3] if image.shape[0] >= 3 else image[:1].expand(3, -1, -1)
    return image.permute(1, 2, 0).contiguous().cpu().numpy()


def _losses(task: Task, loss: Any, judged_by: Any, outputs: Any, targets: Any) -> NDArray[np.float32]:
    """Return the loss of each sample, `(B,)`, of one that does not count 0; where the model computes it, the task's
    default, of its outputs."""
    if task.loss_in_model:
        loss, judged_by = next(iter(getattr(task, "LOSSES", {}).values())), outputs
        targets = getattr(task, "loss_targets", lambda same: same)(targets)
        mean = mean_of(loss)
    else:
        mean = task.mean(loss)
    each, counts = [], []
    count = len(labels_of(targets))
    for n in range(count):
        one = slice(n, n + 1)
        target = select_samples(targets, one)
        each.append(loss(map_tensors(partial(_of_sample, one, count), judged_by), target))
        counts.append(torch.as_tensor(mean.denominator(target), device=each[-1].device))
    values: NDArray[np.float32] = torch.stack(each).float().where(torch.stack(counts) != 0, 0.0).cpu().numpy()
    return values


def _of_sample(one: slice, count: int, values: torch.Tensor) -> torch.Tensor:
    """Return one sample's part of a tensor; all of it, if its first dimension is not that of the `count` samples."""
    return values[one] if values.shape[:1] == (count,) else values


Kept = tuple[Arrays, Arrays, dict[str, torch.Tensor], NDArray[Any] | None]
"""Of a batch: a row per sample, sums, what is drawn beside the image, and the certainty of each sample."""


def _nothing(task: Task, outputs: Any, targets: torch.Tensor) -> Kept:  # noqa: ARG001
    return {}, {}, {}, None


def _classes(task: Task, outputs: Any, targets: torch.Tensor) -> Kept:
    probabilities, predictions = task.predict(outputs).max(1)
    rows = {
        "targets": targets.long().cpu().numpy(),
        "predictions": predictions.cpu().numpy(),
        "probabilities": probabilities.float().cpu().numpy(),
    }
    return rows, {}, {}, rows["probabilities"]


def _labels(task: Task, outputs: Any, targets: torch.Tensor) -> Kept:
    probabilities = task.predict(outputs).float().cpu().numpy()
    rows = {"targets": (targets > 0.5).cpu().numpy(), "probabilities": probabilities}
    return rows, {}, {}, np.abs(probabilities - 0.5).min(1)


def _values(task: Task, outputs: Any, targets: torch.Tensor) -> Kept:
    values = task.predict(outputs).double().cpu().numpy().reshape(len(targets), -1)
    rows = {"targets": targets.double().cpu().numpy().reshape(values.shape), "values": values}
    return rows, {}, {}, None


def _pixels(task: Task, outputs: Any, targets: torch.Tensor) -> Kept:
    classes, predictions = outputs.shape[1], task.predict(outputs)
    targets = task.metric_targets(targets).long()
    counts = (targets != IGNORED) & (targets < classes)
    pairs = torch.bincount(targets[counts] * classes + predictions[counts], minlength=classes**2)
    rows = {
        "right": ((predictions == targets) & counts).flatten(1).sum(1).cpu().numpy(),
        "counted": counts.flatten(1).sum(1).cpu().numpy(),
    }
    confusion = {"confusion": pairs.view(classes, classes).cpu().numpy()}
    return rows, confusion, {"truth": targets, "prediction": predictions}, None


KINDS: dict[str, tuple[Any, Callable[..., Kept]]] = {
    "class indices": (ClassErrors, _classes),
    "labels": (LabelErrors, _labels),
    "values": (ValueErrors, _values),
    "masks": (PixelErrors, _pixels),
}
"""By the kind of a standard task's targets: the result's class, and what is kept of a batch; else only the losses."""
