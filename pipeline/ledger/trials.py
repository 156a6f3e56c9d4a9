"""A trial of the ledger: a variant trains (or only loads, computes or copies) on some batches, and is timed."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.errors import NonFiniteError
from ...loaders import FFCVLoader, StockFFCVLoader
from ...loaders.epochs import Batch, EpochLoader
from ...loaders.image_size import ImageSize
from ...strategies import Engine
from ...strategies.common.memory import HeldBytes, held_bytes
from ...transforms import LayerFreezing
from ..describe.fit import LOG_EVERY
from ..measuring.budget import until
from ..telemetry.metrics import Metrics
from ..telemetry.observer import Observer, Observers, Phase
from ..telemetry.progress import Progress
from ..telemetry.state import TrainState
from ..training.build import Built
from ..training.guard import NonFiniteGuard
from ..training.loop import train_epoch
from .data import PARTS, Trial, Workload
from .schedule import Phase as SchedulePhase

Labels = list[NDArray[Any]]
"""The labels of each of this rank's batches, in order."""


@dataclass
class BuiltVariant:
    """What a variant's trials need on this rank: the built pipeline, its phases, and a loader for each image size."""

    built: Built
    phases: Sequence[SchedulePhase]
    loader: Callable[[ImageSize], EpochLoader]
    freezing: LayerFreezing | None
    settings: Callable[[], AbstractContextManager[None]] = nullcontext
    """torch's settings while it runs; see `cuda_settings`."""


def run_trial(
    variant: BuiltVariant,
    kind: Workload,
    epoch: int,
    batches: int,
    deadline: float = math.inf,
    observer: Observer | None = None,
) -> tuple[Trial, Labels]:
    """Run a trial over `batches` global batches; return it with this rank's labels.

    If a schedule changes the image size or the frozen layers, the trial runs in each of its phases, on the same
    samples, weighted by the phase's share of a full run. `observer` follows the steps of kind "train".

    Raises:
        OutOfTime: before the first batch that would start after the deadline (in `perf_counter` time).
    """
    results = []
    for phase in variant.phases:
        with variant.settings(), _frozen(variant, phase):
            loader = variant.loader(phase.image_size)
            results.append(_run_phase(variant, loader, kind, epoch, batches, deadline, observer))
    trials = [trial for trial, _ in results]
    return mean_trial(trials, [phase.share for phase in variant.phases]), results[0][1]


def mean_trial(trials: Sequence[Trial], shares: Sequence[float]) -> Trial:
    """Return the weighted mean of trials on the same samples; the shares, their weights, sum to 1."""

    def mixed(seconds: Sequence[float]) -> float:
        return float(np.dot(shares, seconds))

    parts = [trial.parts or {} for trial in trials]
    return replace(
        trials[0],
        seconds=mixed([trial.seconds for trial in trials]),
        waited=mixed([trial.waited for trial in trials]),
        parts={name: mixed([part[name] for part in parts]) for name in parts[0]} or None,
    )


@contextmanager
def _frozen(variant: BuiltVariant, phase: SchedulePhase) -> Iterator[None]:
    """Freeze the phase's layers inside the block; unfreeze them on exit, which `LayerFreezing` does not do."""
    if variant.freezing is None:
        yield
        return
    trainable = [p for p in variant.built.engine.plain_model.parameters() if p.requires_grad]
    variant.freezing.freeze(variant.built.engine.plain_model, phase.progress)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _run_phase(
    variant: BuiltVariant,
    loader: EpochLoader,
    kind: Workload,
    epoch: int,
    batches: int,
    deadline: float,
    observer: Observer | None,
) -> tuple[Trial, Labels]:
    engine, hooks = variant.built.engine, variant.built.hooks
    batch_size = loader.settings.batch_size
    batches = min(batches, loader.samples // batch_size)
    # With the exact samples of the trial, no loader prefetches while something else is measured.
    loader.set_indices(range((1 if kind in ("model", "copy") else batches) * batch_size))
    loader.set_epoch(epoch)
    seen: list[Any] = []
    source: Any = list(loader) * batches if kind in ("model", "copy") else _recorded(loader, seen)
    copies = _Copies(loader, source[0]) if kind == "copy" else None
    source = until(deadline, source)
    parts: dict[str, float] | None = None
    hooks.begin(engine, batches, loader)  # creates the weight averages, which training does only once
    with _extras(engine, batches, batch_size) if kind == "extras" else nullcontext() as extras:
        engine.barrier()
        _wait_for(engine)
        start = perf_counter()
        if copies is not None:
            images = copies.run(batches) * engine.world_size
            waited = 0.0
        elif kind == "loader":
            images = sum(len(batch[0]) for batch in source) * engine.world_size
            waited = perf_counter() - start
        else:
            if kind == "split":
                observer = timed = PhaseClock(engine)
                parts = timed.seconds
            elif extras is not None:
                observer = extras
                extras.on_start(hooks.state)
            stats = train_epoch(engine, source, variant.built.loss, hooks, observer=observer)
            images, waited = stats.images, stats.data_wait_s
            parts = {"extras": extras.seconds} if extras else parts
        _wait_for(engine)
        seconds = perf_counter() - start
    trial = Trial(images, seconds, waited, parts=parts)
    return trial, [labels.cpu().numpy() for labels in seen]


@contextmanager
def _extras(engine: Engine, steps: int, batch_size: int) -> Iterator[TimedObservers]:
    """Yield the observers that `fit` adds: progress bar, CSV log and guard.

    The bar is written to /dev/null, the log to a temporary folder. Checkpoints are excluded: they are saved per epoch,
    and a trial is not an epoch.
    """
    lead = engine.rank == 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        Progress(1, 1, steps * batch_size, show=lead, file=nowhere) as bar,
    ):
        # A trial shorter than the logging interval logs once.
        metrics = Metrics(("csv",) if lead else (), Path(folder), min(LOG_EVERY, steps))
        yield TimedObservers(RecordingGuard(engine, "raise", str), bar, metrics)
        metrics.on_end(failed=False)


class TimedObservers(Observers):
    """Observers whose work at each step is timed: `seconds`, on the host, without synchronizing a GPU."""

    def __init__(self, *observers: Observer) -> None:
        super().__init__(*observers)
        self.seconds = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - start

    def on_step_start(self, state: TrainState) -> None:
        with self._timed():
            super().on_step_start(state)

    def should_step(self, state: TrainState, loss: torch.Tensor) -> bool:
        with self._timed():
            return super().should_step(state, loss)

    def on_optimizer_step(self, state: TrainState, norm: torch.Tensor | None, skipped: bool) -> None:
        with self._timed():
            super().on_optimizer_step(state, norm, skipped)

    def on_step_end(self, state: TrainState, loss: torch.Tensor, images: int) -> None:
        with self._timed():
            super().on_step_end(state, loss, images)

    def flush(self) -> None:
        with self._timed():
            super().flush()


class RecordingGuard(NonFiniteGuard):
    """Check every loss without raising: a ledger trains at the peak learning rate from the start, and discards its
    weights."""

    def _judged(self, step: int, losses: list[float]) -> bool:
        with suppress(NonFiniteError):
            super()._judged(step, losses)
        return True

    def _check_norm(self, step: int, value: float) -> None:
        with suppress(NonFiniteError):
            super()._check_norm(step, value)

    def on_optimizer_step(self, state: TrainState, norm: torch.Tensor | None, skipped: bool) -> None:
        with suppress(NonFiniteError):
            super().on_optimizer_step(state, norm, skipped)


def _recorded(loader: EpochLoader, seen: list[Any]) -> Iterator[Batch]:
    """Yield the loader's batches, and keep their labels without waiting for a GPU."""
    for images, labels, *further in loader:
        seen.append(labels)
        yield (images, labels, *further)


def digest(ranks: Sequence[Labels]) -> str:
    """Return a digest of the labels of all global batches in order, given each rank's share; independent of the world
    size."""
    sha = hashlib.sha256()
    for shares in zip(*ranks, strict=True):
        sha.update(np.ascontiguousarray(np.concatenate(shares)).astype(np.float64).tobytes())
    return sha.hexdigest()[:16]


def _wait_for(engine: Engine) -> None:
    """Wait until the device has completed its queued work."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


class _Copies:
    """Copies of a batch from host memory to the device, as the loader performs them.

    Args:
        loader: the loader. TorchLoader copies the final batch; the others copy bytes to a GPU and normalize there.
        batch: a batch of the loader.
    """

    def __init__(self, loader: EpochLoader, batch: Batch) -> None:
        images, labels = batch[:2]
        pinned, on_gpu = images.device.type == "cuda", images.device.type != "cpu"
        dtype = torch.uint8 if on_gpu and isinstance(loader, FFCVLoader | StockFFCVLoader) else images.dtype
        self._sources = [
            torch.empty(images.shape, dtype=dtype, pin_memory=pinned),
            torch.empty(labels.shape, dtype=labels.dtype, pin_memory=pinned),
        ]
        self._targets = [torch.empty_like(one, device=images.device) for one in self._sources]

    def run(self, times: int) -> int:
        """Copy the batch `times` times, and return the number of images copied."""
        for _ in range(times):
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source, non_blocking=True)
        return times * len(self._sources[0])


class PhaseClock(Observer):
    """Time the phases of each step. A GPU is synchronized at each change of phase."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._engine, self._phase, self._since = engine, "other", 0.0

    def on_phase(self, phase: Phase) -> None:
        """Add the time of the ending phase."""
        if phase == self._phase:
            return
        _wait_for(self._engine)
        if self._phase in self.seconds:
            self.seconds[self._phase] += perf_counter() - self._since
        self._phase, self._since = phase, perf_counter()


class MemoryScale(Observer):
    """Record before each optimizer step what the engine holds in memory; `held` is the last record."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.steps = engine, 0
        self.held: HeldBytes | None = None

    def on_phase(self, phase: Phase) -> None:
        """Measure the engine's memory."""
        if phase == "step":
            self.held = held_bytes(self._engine)
            self.steps += 1
