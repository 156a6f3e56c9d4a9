"""A trial of the ledger: a variant trains (or only loads, computes, copies) on some batches, and is timed."""

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

from ...errors import NonFiniteError
from ...loaders import FFCVLoader
from ...loaders.epochs import Batch, EpochLoader
from ...strategies import Engine
from ...strategies.common.memory import HeldBytes, held_bytes
from ...transforms import LayerFreezing
from ..telemetry.loggers import LOG_EVERY
from ..telemetry.metrics import Metrics
from ..telemetry.observer import Observer, Observers, Phase
from ..telemetry.progress import Progress
from ..telemetry.state import TrainState
from ..training.build import Built
from ..training.guard import NonFiniteGuard
from ..training.loop import train_epoch
from .budget import until
from .data import Trial, Workload
from .schedule import Phase as SchedulePhase

Labels = list[NDArray[Any]]
"""Of each of this rank's batches, in order."""


@dataclass
class BuiltVariant:
    """What a variant's trials need on this rank: what was built, its schedule, and a loader for each size."""

    built: Built
    phases: Sequence[SchedulePhase]
    loader: Callable[[int], EpochLoader]
    freezing: LayerFreezing | None
    settings: Callable[[], AbstractContextManager[None]] = nullcontext
    """What torch is set to while it runs; see `cuda_settings`."""


def run_trial(
    variant: BuiltVariant,
    kind: Workload,
    epoch: int,
    batches: int,
    deadline: float = math.inf,
    observer: Observer | None = None,
) -> tuple[Trial, Labels]:
    """A trial over `batches` global batches, and this rank's labels in it.

    Where the pipeline's schedule changes the image size or the frozen layers, the trial runs in each of
    the schedule's phases, on the same samples, and each counts by the share it has in a training. `observer`
    follows the steps of kind "train".

    Raises:
        OutOfTime: before the first batch that would begin after the deadline (on `perf_counter`'s clock).
    """
    found = []
    for phase in variant.phases:
        with variant.settings(), _frozen(variant, phase):
            loader = variant.loader(phase.image_size)
            found.append(_run_phase(variant, loader, kind, epoch, batches, deadline, observer))
    return mean_trial([trial for trial, _ in found], [phase.share for phase in variant.phases]), found[0][1]


def mean_trial(trials: Sequence[Trial], shares: Sequence[float]) -> Trial:
    """Trials on the same samples as one, the time of each counted by its share; the shares add up to 1."""

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
    """Inside it the layers are frozen that are frozen then; `LayerFreezing` itself thaws none."""
    if variant.freezing is None:
        yield
        return
    learning = [p for p in variant.built.engine.plain_model.parameters() if p.requires_grad]
    variant.freezing.freeze(variant.built.engine.plain_model, phase.progress)
    try:
        yield
    finally:
        for parameter in learning:
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
    # One batch is loaded to its end, so that no loader works ahead while another thing is measured.
    loader.set_indices(range((1 if kind in ("model", "copy") else batches) * batch_size))
    loader.set_epoch(epoch)
    seen: list[Any] = []
    source: Any = list(loader) * batches if kind in ("model", "copy") else _recorded(loader, seen)
    copies = _Copies(loader, source[0]) if kind == "copy" else None
    source = until(deadline, source)
    parts: dict[str, float] | None = None
    hooks.begin(engine, batches)  # takes the averages' first copies; a training does so once
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
    """What `fit` does beside the steps: bar, CSV log and guard.

    The bar is drawn to nowhere; the log goes into a folder that is removed. Checkpoints are not among them:
    they belong to epochs, and a trial is not one.
    """
    lead = engine.rank == 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(os.devnull).open("w") as nowhere,
        Progress(1, 1, steps * batch_size, show=lead, file=nowhere) as bar,
    ):
        # A trial of fewer steps than lie between two entries logs once.
        metrics = Metrics(("csv",) if lead else (), Path(folder), min(LOG_EVERY, steps))
        yield TimedObservers(RecordingGuard(engine, "raise", str), bar, metrics)
        metrics.on_end(failed=False)


class TimedObservers(Observers):
    """Observers whose work at each step is timed: `seconds`, of this process (a GPU is not waited for)."""

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
    """Looks at every loss, and stops nothing: a ledger has the peak rate at once, and its weights go away."""

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
    """The loader's batches; their labels are kept as they come, without waiting for a GPU."""
    for images, labels, *further in loader:
        seen.append(labels)
        yield (images, labels, *further)


def digest(ranks: Sequence[Labels]) -> str:
    """Of the labels of each global batch in order, given each rank's share; the same for any number of ranks."""
    found = hashlib.sha256()
    for shares in zip(*ranks, strict=True):
        found.update(np.ascontiguousarray(np.concatenate(shares)).astype(np.float64).tobytes())
    return found.hexdigest()[:16]


def _wait_for(engine: Engine) -> None:
    """Wait until the device has finished the work it was given."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


class _Copies:
    """Copies of a batch from this machine's memory to the device, as the loader does them.

    Args:
        loader: FFCV's sends a GPU bytes and normalises there; the other one sends what it made.
        batch: one that it gave.
    """

    def __init__(self, loader: EpochLoader, batch: Batch) -> None:
        images, labels = batch[:2]
        pinned, on_gpu = images.device.type == "cuda", images.device.type != "cpu"
        dtype = torch.uint8 if on_gpu and isinstance(loader, FFCVLoader) else images.dtype
        self._sources = [
            torch.empty(images.shape, dtype=dtype, pin_memory=pinned),
            torch.empty(labels.shape, dtype=labels.dtype, pin_memory=pinned),
        ]
        self._targets = [torch.empty_like(one, device=images.device) for one in self._sources]

    def run(self, times: int) -> int:
        """Copies so many times; the images that were copied."""
        for _ in range(times):
            for target, source in zip(self._targets, self._sources, strict=True):
                target.copy_(source, non_blocking=True)
        return times * len(self._sources[0])


class PhaseClock(Observer):
    """Time the phases of each step; a GPU is waited for at each change, so that each phase has its own time."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        self._engine, self._phase, self._since = engine, "other", 0.0

    def on_phase(self, phase: Phase) -> None:
        """Add the time of the phase that ends here."""
        if phase == self._phase:
            return
        _wait_for(self._engine)
        if self._phase in self.seconds:
            self.seconds[self._phase] += perf_counter() - self._since
        self._phase, self._since = phase, perf_counter()


class MemoryScale(Observer):
    """Note before each optimizer step what the engine holds in memory; `held` is that of the last one."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.steps = engine, 0
        self.held: HeldBytes | None = None

    def on_phase(self, phase: Phase) -> None:
        """Weigh the engine."""
        if phase == "step":
            self.held = held_bytes(self._engine)
            self.steps += 1
