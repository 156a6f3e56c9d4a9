"""A trial: a variant trains (or only loads, computes or copies) on some batches, and is timed."""

import hashlib
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.budget import until
from ...loaders import FFCVLoader, StockFFCVLoader
from ...loaders.epochs import Batch, EpochLoader
from ...loaders.image_size import ImageSize
from ...strategies import Engine
from ...strategies.common.memory import HeldBytes, held_bytes
from ...strategies.devices import wait_for
from ...transforms import Loop, Transform
from ..describe.config import LOG_EVERY
from ..describe.rules import sets_size
from ..ledger.variant import PARTS, Trial, Workload
from ..telemetry.loggers import Metrics
from ..telemetry.observer import Observer, Observers
from ..telemetry.progress import Progress
from ..training.build import Built
from ..training.guard import NonFiniteGuard
from ..training.loop import train_epoch

Labels = list[NDArray[Any]]  # of each of this rank's batches, in order
_LONG = 1 << 30  # steps of a run of which those of a trial are a negligible part
_EVERY = 2520  # of which 1 to 10 are divisors: what is done every so many steps is due as at the beginning of a run


@dataclass(frozen=True)
class SchedulePhase:
    """A phase of a run: size of loaded images, progress, which sets the frozen layers, and share of the run, 0 to 1;
    and the progress of all its steps, if a transform of batches changes the size of their images in the run."""

    image_size: ImageSize
    progress: float
    share: float
    at: float | None = None


def phases(transforms: Sequence[Transform], image_size: ImageSize) -> list[SchedulePhase]:
    """Return the phases whose average is the run's time per step: Simpson's rule where a schedule changes, exact if the
    time is of up to third degree in the side (it grows with the square) and linear in the frozen fraction."""
    points = {0.0, 1.0}.union(*(transform.turning_points for transform in transforms))
    of_batches = any(each.kind == "batch" and each.turning_points and not sets_size(each) for each in transforms)
    shares: dict[tuple[ImageSize, float, float | None], float] = defaultdict(float)
    for begin, end in pairwise(sorted(points)):
        if end - begin < 1e-9:  # equal up to rounding
            continue
        middle = (begin + end) / 2
        for progress, weight in ((begin, 1 / 6), (middle, 4 / 6), (end, 1 / 6)):
            # At the end itself, the size may jump to that of the next interval.
            inside, size = min(progress, end - 1e-6), image_size
            for transform in transforms:
                size = transform.size(size, inside)
            frozen = progress if any(transform.level(progress) > 0 for transform in transforms) else 0.0
            shares[size, frozen, middle if of_batches else None] += weight * (end - begin)
    return [SchedulePhase(size, frozen, share, at) for (size, frozen, at), share in sorted(shares.items())]


@dataclass
class BuiltVariant:
    built: Built
    phases: Sequence[SchedulePhase]
    loader: Callable[[ImageSize], EpochLoader]
    samples: Callable[[EpochLoader, int], NDArray[np.int64]]  # of a trial, up to so many
    settings: Callable[[], AbstractContextManager[None]] = nullcontext  # torch's; see `cuda_settings`


def run_trial(
    variant: BuiltVariant, kind: Workload, epoch: int, batches: int, deadline: float = math.inf,
    observer: Observer | None = None,
) -> tuple[Trial, Labels]:  # fmt: skip
    """Run a trial over `batches` global batches, in each phase of a schedule on the same samples; return it with this
    rank's labels. Raise OutOfTime before a batch after the deadline (in `perf_counter` time)."""
    results = []
    for phase in variant.phases:
        with variant.settings(), _frozen(variant, phase):
            loader = variant.loader(phase.image_size)
            results.append(_run_phase(variant, loader, kind, epoch, batches, deadline, observer, phase.at))
    shares = [phase.share for phase in variant.phases]
    return mean_trial([trial for trial, _ in results], shares), results[0][1]


def mean_trial(trials: Sequence[Trial], shares: Sequence[float]) -> Trial:
    """Return the weighted mean of trials on the same samples; the shares, their weights, sum to 1."""
    names = trials[0].parts or ()
    table = [[trial.seconds, trial.waited, *((trial.parts or {})[name] for name in names)] for trial in trials]
    seconds, waited, *parts = np.dot(shares, table).tolist()
    return replace(trials[0], seconds=seconds, waited=waited, parts=dict(zip(names, parts, strict=True)) or None)


@contextmanager
def _frozen(variant: BuiltVariant, phase: SchedulePhase) -> Iterator[None]:
    """Freeze the phase's layers inside the block; unfreeze them on exit, which no run does."""
    model = variant.built.engine.plain_model
    trainable = [p for p in model.parameters() if p.requires_grad]
    for transform in variant.built.plan.transforms:
        transform.freeze(model, phase.progress)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _run_phase(
    variant: BuiltVariant, loader: EpochLoader, kind: Workload, epoch: int, batches: int, deadline: float,
    observer: Observer | None, at: float | None,
) -> tuple[Trial, Labels]:  # fmt: skip
    engine, hooks = variant.built.engine, variant.built.hooks
    batch_size = loader.settings.batch_size
    chosen = variant.samples(loader, batches * batch_size)
    batches = len(chosen) // batch_size
    repeats = kind in ("model", "copy")
    # With the exact samples of the trial, no loader prefetches while something else is measured.
    loader.set_indices(chosen[: (1 if repeats else batches) * batch_size])
    loader.set_epoch(epoch)
    seen: list[Any] = []
    source: Any = list(loader) * batches if repeats else _recorded(loader, seen)
    buffers = _buffers(loader, source[0]) if kind == "copy" else []
    source = until(deadline, source)
    parts: dict[str, float] | None = None
    hooks.begin(engine, batches, loader)  # creates the weight averages, which training does only once
    if at is not None:
        hooks.state.total_steps, hooks.state.step = _LONG, int(at * _LONG) // _EVERY * _EVERY
    with _extras(engine, batches, batch_size) if kind == "extras" else nullcontext() as extras:
        engine.barrier()
        wait_for(engine.device)
        start = perf_counter()
        if kind == "copy":
            images, waited = batches * batch_size, 0.0
            for _ in range(batches):
                for host, device in buffers:
                    device.copy_(host, non_blocking=True)
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
        wait_for(engine.device)
        seconds = perf_counter() - start
    return Trial(images, seconds, waited, parts=parts), [labels.cpu().numpy() for labels in seen]


@contextmanager
def _extras(engine: Engine, steps: int, batch_size: int) -> Iterator["TimedObservers"]:
    """Yield the observers that `fit` adds: progress bar (to /dev/null), CSV log (to a temporary folder) and guard.
    Checkpoints are excluded: they are saved per epoch, and a trial is not an epoch."""
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

    def calls(self, moment: str) -> Iterator[Callable[[Any], Any]]:
        for call in super().calls(moment):
            yield self._timed()(call)

    def flush(self) -> None:
        with self._timed():
            super().flush()


class RecordingGuard(NonFiniteGuard):
    """Check without raising: a ledger trains at the peak learning rate from the start, and discards its weights."""

    def _fail(self, text: str) -> None:
        """Raise nothing: a trial continues."""


def _recorded(loader: EpochLoader, seen: list[Any]) -> Iterator[Batch]:
    for batch in loader:
        seen.append(batch[1])
        yield batch


def digest(ranks: Sequence[Labels]) -> str:
    """Return a digest of all global batches' labels, given each rank's share; independent of the world size."""
    sha = hashlib.sha256()
    for shares in zip(*ranks, strict=True):
        sha.update(np.ascontiguousarray(np.concatenate(shares)).astype(np.float64).tobytes())
    return sha.hexdigest()[:16]


def _buffers(loader: EpochLoader, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return host and device memory for a batch's images and labels, as the loader copies between them: TorchLoader
    copies the final batch, as all do of 16 bits; the others copy bytes to a GPU and normalize there."""
    images, labels = batch[:2]
    device, dtype = images.device, images.dtype
    if device.type != "cpu" and loader.depth == 8 and isinstance(loader, FFCVLoader | StockFFCVLoader):
        dtype = torch.uint8
    sources = [
        torch.empty(one.shape, dtype=kind, pin_memory=device.type == "cuda")
        for one, kind in ((images, dtype), (labels, labels.dtype))
    ]
    return [(source, torch.empty_like(source, device=device)) for source in sources]


PHASES = {
    "on_step_start": "transforms", "before_forward": "forward", "after_forward": "loss", "before_backward": "backward",
    "after_backward": "hooks", "before_step": "step", "on_optimizer_step": "hooks", "on_step_end": "other",
}  # fmt: skip
"""What a step does after each moment. "transforms" are those of batches, with their forwards; "hooks" what other
transforms do around the optimizer's step, such as SAM's perturbation, clipping, and averages; "other" is the rest."""


class PhaseClock(Observer):
    """Time the phases of each step, synchronizing a GPU at each change of phase."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._engine, self._phase, self._since = engine, "other", 0.0

    def calls(self, moment: str) -> Iterator[Callable[[Any], Any]]:
        if moment in PHASES:
            yield partial(self._enter, PHASES[moment])

    def _enter(self, phase: str, _: object) -> None:
        if phase == self._phase:
            return
        wait_for(self._engine.device)
        if self._phase in self.seconds:  # of the ending phase
            self.seconds[self._phase] += perf_counter() - self._since
        self._phase, self._since = phase, perf_counter()


class MemoryScale(Observer):
    """Record what the engine holds in memory before each optimizer step; `held` is the last record."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.steps = engine, 0
        self.held: HeldBytes | None = None

    def before_step(self, loop: Loop) -> None:  # noqa: ARG002
        self.held = held_bytes(self._engine)
        self.steps += 1
