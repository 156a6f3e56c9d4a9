"""Who takes the ledger's turns: variants kept built in this process, or on ranks that start for each round."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from time import perf_counter
from typing import Any, cast

import torch

from ..loaders.epochs import EpochLoader
from ..strategies import Engine, launch
from ..transforms import LayerFreezing
from .build import build, make_loader, seeded
from .builder import Pipeline
from .ledger_rounds import Turn
from .ledger_schedule import phases
from .ledger_turns import Bench, Labels, WeighedEngine, digest, take_turn
from .ledger_variants import Kind, Variant
from .plan import train_settings

MIN_BATCHES = 4  # in a turn; fewer, and filling the loader's queue would count

Costs = dict[str, Any]
"""Of a variant on one rank: `held_bytes`, `peak_bytes`, `compile_seconds`; None where not measured."""
Found = dict[str, tuple[Turn, Labels]]
"""Turns by name, and a rank's labels in them."""


class Loaders:
    """The training loaders of one process: variants that load alike share one, with its workers."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._found: list[tuple[Any, EpochLoader]] = []

    def get(self, pipeline: Pipeline, image_size: int, device: torch.device) -> EpochLoader:
        """The pipeline's training loader, giving images of that side."""
        assert pipeline.data is not None  # the plan has checked
        data = dataclasses.replace(pipeline.data, image_size=image_size)
        key = (data, train_settings(data, pipeline.transforms), pipeline.seed, device)
        for known, loader in self._found:
            if known == key:
                return loader
        loader = self._stack.enter_context(make_loader(pipeline, data, data.train, train=True, device=device))
        self._found.append((key, loader))
        return loader


class Taker:
    """The variants of one pipeline, which take their turns one after the other.

    Attributes:
        names: of the variants.
        seconds: that the last turns took, start of ranks included.
        costs: what training costs besides time; the largest over all ranks.
    """

    def __init__(self, group: Sequence[Variant], loaders: Loaders, stack: ExitStack) -> None:
        self._pipeline = group[0].pipeline
        self._kinds = {variant.name: variant.kind for variant in group}
        self.names = list(self._kinds)
        self.seconds = 0.0
        self.costs: Costs = {}
        self._bench: Bench | None = None
        if not self.on_ranks:
            self._bench, self.costs = open_bench(self._pipeline, loaders, stack)

    @property
    def on_ranks(self) -> bool:
        """Whether it starts processes for each round."""
        return self._pipeline.distribution.devices > 1

    def take(self, epoch: int, batches: int, backwards: bool) -> dict[str, Turn]:
        """A turn of each variant: the epoch decides the samples; every second round goes backwards."""
        start = perf_counter()
        names = self.names[:: -1 if backwards else 1]
        kinds = {name: self._kinds[name] for name in names}
        if self._bench is not None:
            ranks = [_take(self._bench, kinds, epoch, batches)]
        else:
            devices = self._pipeline.distribution.devices
            answers = launch(
                _turns_on_rank,
                self._pipeline,
                kinds,
                epoch,
                batches,
                devices=devices,
                device=self._pipeline.distribution.device,
            )
            ranks = [turns for turns, _ in answers]
            self.costs = largest([costs for _, costs in answers])
        self.seconds = perf_counter() - start
        return {name: _merged([rank[name] for rank in ranks]) for name in names}


def _turns_on_rank(
    pipeline: Pipeline, kinds: dict[str, Kind], epoch: int, batches: int
) -> tuple[Found, Costs]:
    with seeded(pipeline.seed), ExitStack() as stack:
        bench, costs = open_bench(pipeline, Loaders(stack), stack)  # the ranks are new: warm them up, too
        return _take(bench, kinds, epoch, batches), costs


def _take(bench: Bench, kinds: dict[str, Kind], epoch: int, batches: int) -> Found:
    return {name: take_turn(bench, kind, epoch, batches) for name, kind in kinds.items()}


def _merged(ranks: Sequence[tuple[Turn, Labels]]) -> Turn:
    """The slowest rank's turn, with the digest of what all of them trained on."""
    slowest = max((turn for turn, _ in ranks), key=lambda turn: turn.seconds)
    return dataclasses.replace(slowest, samples=digest([labels for _, labels in ranks]))


def open_bench(pipeline: Pipeline, loaders: Loaders, stack: ExitStack) -> tuple[Bench, Costs]:
    """Builds a pipeline on this rank, warms it up by training, and says what that took."""
    assert pipeline.data is not None  # the plan has checked
    before = _allocated()
    with seeded(pipeline.seed):
        built = stack.enter_context(build(pipeline))
    engine = built.engine
    bench = Bench(
        built,
        phases(pipeline.transforms, pipeline.data.image_size),
        lambda size: loaders.get(pipeline, size, engine.device),
        next((t for t in pipeline.transforms if isinstance(t, LayerFreezing)), None),
    )
    if pipeline.distribution.compile:
        take_turn(bench, "loader", 0, MIN_BATCHES)  # its workers start now, and not in the first turn
    weighed = WeighedEngine(engine)
    built.engine = cast(Engine, weighed)
    first, _ = take_turn(bench, "train", 0, MIN_BATCHES)
    if weighed.steps < 2:  # in the first step there is no optimizer state yet
        take_turn(bench, "train", 0, MIN_BATCHES)
    built.engine = engine
    compiling = None
    if pipeline.distribution.compile:
        compiling = max(first.seconds - take_turn(bench, "train", 0, MIN_BATCHES)[0].seconds, 0.0)
    held = None if weighed.held is None else asdict(weighed.held)
    return bench, {
        "held_bytes": held,
        "peak_bytes": _peak(engine.device, before),
        "compile_seconds": compiling,
    }


def _allocated() -> list[int]:
    """Bytes on each GPU that tensors take now, from which the peaks are counted anew."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    for number in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(number)
    return [torch.cuda.memory_allocated(number) for number in range(torch.cuda.device_count())]


def _peak(device: torch.device, before: list[int]) -> int | None:
    """Bytes that were allocated at most on this GPU since then, beyond what was there."""
    if device.type != "cuda":
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.max_memory_allocated(number) - (before[number] if before else 0)


def largest(ranks: Sequence[Costs]) -> Costs:
    """The largest of each cost over all ranks."""
    found: Costs = {}
    for name in ranks[0]:
        values = [rank[name] for rank in ranks if rank[name] is not None]
        if not values:
            found[name] = None
        elif isinstance(values[0], dict):
            found[name] = largest(values)
        else:
            found[name] = max(values)
    return found


def groups(variants: Iterable[Variant]) -> list[list[Variant]]:
    """The variants in order; those of one and the same pipeline are one group, which is built once."""
    found: list[list[Variant]] = []
    for variant in variants:
        if found and found[-1][0].pipeline is variant.pipeline:
            found[-1].append(variant)
        else:
            found.append([variant])
    return found
