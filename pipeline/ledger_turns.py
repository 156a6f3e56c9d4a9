"""A turn of the ledger: a variant trains (or only loads, computes, copies) on some batches, and is timed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..loaders import FFCVLoader
from ..loaders.epochs import Batch, EpochLoader
from ..strategies import Engine
from ..strategies.memory import HeldBytes, held_bytes
from ..transforms import LayerFreezing
from .build import Built
from .ledger_rounds import Turn, mean_turn
from .ledger_schedule import Phase
from .ledger_variants import Kind
from .loop import train_epoch
from .progress import Progress
from .sums import Sums

Labels = list[NDArray[Any]]
"""Of each of this rank's batches, in order."""


@dataclass
class Bench:
    """What a variant's turns need on this rank: what was built, its schedule, and a loader for each size."""

    built: Built
    phases: Sequence[Phase]
    loader: Callable[[int], EpochLoader]
    freezing: LayerFreezing | None


def take_turn(bench: Bench, kind: Kind, epoch: int, batches: int) -> tuple[Turn, Labels]:
    """A turn over `batches` global batches, and this rank's labels in it.

    Where the pipeline's schedule changes the image size or the frozen layers, the turn is taken at each of
    the schedule's phases, on the same samples, and each counts by the share it has in a training.
    """
    found = []
    for phase in bench.phases:
        with _frozen(bench, phase):
            found.append(_one_turn(bench, bench.loader(phase.image_size), kind, epoch, batches))
    return mean_turn([turn for turn, _ in found], [phase.share for phase in bench.phases]), found[0][1]


@contextmanager
def _frozen(bench: Bench, phase: Phase) -> Iterator[None]:
    """Inside it the layers are frozen that are frozen then; `LayerFreezing` itself thaws none."""
    if bench.freezing is None:
        yield
        return
    learning = [p for p in bench.built.engine.plain_model.parameters() if p.requires_grad]
    bench.freezing.freeze(bench.built.engine.plain_model, phase.progress)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _one_turn(bench: Bench, loader: EpochLoader, kind: Kind, epoch: int, batches: int) -> tuple[Turn, Labels]:
    engine, methods = bench.built.engine, bench.built.methods
    batch_size = loader.settings.batch_size
    batches = min(batches, loader.samples // batch_size)
    # One batch is loaded to its end, so that no loader works ahead while another thing is measured.
    loader.set_indices(range((1 if kind in ("model", "copy") else batches) * batch_size))
    loader.set_epoch(epoch)
    seen: list[Any] = []
    source: Any = list(loader) * batches if kind in ("model", "copy") else _recorded(loader, seen)
    copies = _Copies(loader, source[0]) if kind == "copy" else None
    timed = TimedEngine(engine) if kind == "split" else None
    methods.begin(engine, batches)  # takes the averages' first copies; a training does so once
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
        sums = Sums(torch.zeros((), device=engine.device))
        with _progress_bar(engine, batches * batch_size, show=kind == "bar") as bar:
            stats = train_epoch(
                cast(Engine, timed or engine), source, bench.built.loss,
                watch=partial(_show, bar, sums) if bar else None, methods=methods, sums=sums,
            )  # fmt: skip
        images, waited = stats.images, stats.waited
    _wait_for(engine)
    seconds = perf_counter() - start
    turn = Turn(images, seconds, waited, parts=timed.seconds if timed else None)
    return turn, [labels.cpu().numpy() for labels in seen]


def _show(bar: Progress, sums: Sums, images: int, loss: torch.Tensor) -> None:
    bar.update(images, loss, sums)


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
    """Until the device has done what it was told."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


@contextmanager
def _progress_bar(engine: Engine, images: int, *, show: bool) -> Iterator[Progress | None]:
    """The bar that `fit` shows in a terminal, drawn to nowhere; None if it is not to be shown."""
    if not show:
        yield None
        return
    with (
        Path(os.devnull).open("w") as nowhere,
        Progress(1, 1, images, show=engine.rank == 0, file=nowhere) as bar,
    ):
        yield bar


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


class _WrappedEngine:
    """An engine whose methods can be overridden one by one; everything else is the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class TimedEngine(_WrappedEngine):
    """An engine that times its parts; a GPU is waited for before and after each, so that each has its own time.

    `seconds` has those of forward (the batch methods' own forwards included), backward and step.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        _wait_for(self._engine)
        start = perf_counter()
        yield
        _wait_for(self._engine)
        self.seconds[part] += perf_counter() - start

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The engine's, timed."""
        with self._timed("forward"), self._engine.forward_context():
            yield

    def backward(self, loss: torch.Tensor, last_microbatch: bool = True) -> None:
        """The engine's, timed."""
        with self._timed("backward"):
            self._engine.backward(loss, last_microbatch)

    def step(self) -> float | None:
        """The engine's, timed."""
        with self._timed("step"):
            return self._engine.step()


class WeighedEngine(_WrappedEngine):
    """An engine that notes before each step what it holds in memory; `held` is that of the last one."""

    held: HeldBytes | None = None
    steps = 0

    def step(self) -> float | None:
        """The engine's."""
        self.held = held_bytes(self._engine)
        self.steps += 1
        return self._engine.step()
