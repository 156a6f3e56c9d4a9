"""The ledger: what each stage brings, measured in one run, interleaved, and what binds the whole.

Each variant trains on the same samples with the same loop. A round gives every variant one turn, an
epoch over the same part of the data; ratios are taken within a round, so that a machine whose speed
drifts favours none of them. Warm-up turns are not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from .. import strategies
from ..errors import PlanError
from ..loaders.epochs import Batch
from .build import Built, build, seeded
from .builder import Distribution, Pipeline
from .fit import with_files
from .ledger_result import LOADER, MODEL, PLAIN, Ledger, Turn
from .loop import train_epoch
from .plan import sort_transforms
from .provenance import provenance

MIN_ROUNDS, AIM_ROUNDS, MAX_ROUNDS = 3, 8, 30
MIN_BATCHES = 4  # in a turn; fewer, and filling the loader's queue would count

Kind = Literal["train", "loader", "model"]
"""What a turn runs: training, the loader without a model, or the model on one batch in memory."""


@dataclass(frozen=True)
class Variant:
    """A pipeline to measure, the name of its row, and what of it runs."""

    name: str
    pipeline: Pipeline
    kind: Kind = "train"


def variants(pipeline: Pipeline) -> list[Variant]:
    """Plain PyTorch, each stage added in turn in the plan's order up to the whole, and the two ceilings."""
    data, how = pipeline.data, pipeline.distribution
    assert data is not None  # the plan has checked
    one = Distribution()
    current = pipeline._with(data=dataclasses.replace(data, loader="torch"), transforms=(), distribution=one)
    found = [Variant(PLAIN, current)]

    def add(name: str, **changes: Any) -> None:
        nonlocal current
        current = current._with(**changes)
        found.append(Variant(name, current))

    if data.loader == "ffcv":
        add("+ FFCV loader", data=data)
    for transform in sort_transforms(pipeline.transforms):
        add(f"+ {type(transform).__name__}", transforms=(*current.transforms, transform))
    if how.precision != one.precision:
        one = dataclasses.replace(one, precision=how.precision)
        add(f"+ {how.precision}", distribution=one)
    if dataclasses.replace(how, asked=False) != one:
        name = how.strategy if isinstance(how.strategy, str) else how.strategy.name
        add(f"+ {name} × {how.devices}", distribution=how)
    return [*found, Variant(LOADER, current, "loader"), Variant(MODEL, current, "model")]


def measure(pipeline: Pipeline, *, seconds: float = 120.0, progress: bool = True) -> Ledger:
    """Measures the ledger of a pipeline.

    Args:
        pipeline: plain PyTorch reads the same samples, from the same file.
        seconds: the time to spend, start of the workers included. At least three rounds are measured,
            however long they take.
        progress: show a bar.

    Raises:
        PlanError, DataError, StrategyError: as `Pipeline.fit`.
    """
    if seconds <= 0:
        raise PlanError(f"seconds={seconds} must be positive.")
    begin = perf_counter()
    pipeline.plan()
    pipeline = with_files(pipeline, progress)
    bar = tqdm(desc="ledger: warming up", unit=" turns", disable=not progress, leave=False)
    with ExitStack() as stack:
        stack.callback(bar.close)
        takers = {variant.name: _taker(variant, stack) for variant in variants(pipeline)}
        batches = _warm_up(takers, begin + seconds, bar)
        rounds = _measure_rounds(takers, batches, begin + seconds, bar)
    return Ledger(
        rounds=rounds,
        facts={
            "recipe": pipeline.recipe,
            "plan": pipeline.plan().to_dict()["steps"],
            "batches_per_turn": batches,
            "seconds": round(perf_counter() - begin, 1),
            "provenance": provenance(),
        },
    )


TakeTurn = Callable[[int, int], Turn]
"""Runs one turn: the epoch (which decides the samples), the number of global batches."""


def _taker(variant: Variant, stack: ExitStack) -> TakeTurn:
    """How a variant takes a turn: in this process, kept built; or on ranks that start for each turn."""
    how = variant.pipeline.distribution
    if how.devices == 1:
        with seeded(variant.pipeline.seed):
            built = stack.enter_context(build(variant.pipeline))
        return partial(take_turn, built, variant.kind)

    def launched(epoch: int, batches: int) -> Turn:
        return strategies.launch(
            _turn_on_rank, variant.pipeline, variant.kind, epoch, batches, devices=how.devices
        )[0]

    return launched


def _turn_on_rank(pipeline: Pipeline, kind: Kind, epoch: int, batches: int) -> Turn:
    with seeded(pipeline.seed), build(pipeline) as built:
        take_turn(built, kind, 0, MIN_BATCHES)  # the ranks are new: warm them up, too
        return take_turn(built, kind, epoch, batches)


def take_turn(built: Built, kind: Kind, epoch: int, batches: int) -> Turn:
    """Trains on (or only loads, or only computes) `batches` global batches, and times it."""
    loader, engine = built.train, built.engine
    loader.set_indices(range(min(batches * loader.settings.batch_size, loader.samples)))
    loader.set_epoch(epoch)
    source: Any = loader
    if kind == "model":
        source = _repeat(next(iter(loader)), len(loader))
    engine.barrier()
    start = perf_counter()
    if kind == "loader":
        images = sum(len(images) for images, _ in loader) * engine.world_size
        waited = perf_counter() - start
    else:
        stats = train_epoch(engine, source, built.loss)
        images, waited = stats.images, stats.waited
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    seconds = perf_counter() - start
    return Turn(images=images, seconds=seconds, waited=waited)


def _repeat(batch: Batch, times: int) -> list[Batch]:
    return [batch] * times


def _warm_up(takers: dict[str, TakeTurn], deadline: float, bar: Any) -> int:
    """Runs every variant twice, and chooses how many batches a turn has so that the rounds fit the time."""
    seconds_per_batch = 0.0
    for take in takers.values():
        take(0, MIN_BATCHES)
        bar.update()
    start = perf_counter()
    for take in takers.values():
        turn = take(0, MIN_BATCHES)
        seconds_per_batch += turn.seconds / MIN_BATCHES
        bar.update()
    overhead = perf_counter() - start - seconds_per_batch * MIN_BATCHES  # ranks that start, mostly
    per_round = (deadline - perf_counter()) / AIM_ROUNDS - overhead
    return max(int(per_round / seconds_per_batch), MIN_BATCHES)


def _measure_rounds(
    takers: dict[str, TakeTurn], batches: int, deadline: float, bar: Any
) -> list[dict[str, Turn]]:
    rounds: list[dict[str, Turn]] = []
    longest = 0.0
    while len(rounds) < MIN_ROUNDS or (perf_counter() + longest < deadline and len(rounds) < MAX_ROUNDS):
        start = perf_counter()
        bar.set_description(f"ledger: round {len(rounds) + 1}")
        turns: dict[str, Turn] = {}
        # Every second round runs backwards, so that none always follows the same neighbour.
        for name in list(takers)[:: -1 if len(rounds) % 2 else 1]:
            turns[name] = takers[name](len(rounds) + 1, batches)
            bar.update()
        rounds.append({name: turns[name] for name in takers})
        longest = max(longest, perf_counter() - start)
    return rounds
