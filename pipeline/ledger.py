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

from ..errors import PlanError
from ..strategies import launch
from ..strategies.group import under_torchrun
from .build import Built, build, seeded
from .builder import Pipeline
from .fit import with_files
from .ledger_result import LOADER, MODEL, PLAIN, Ledger, Turn
from .loop import train_epoch
from .plan import sort_transforms
from .provenance import provenance
from .stages import Distribution

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
    device = how.options.get("device", getattr(how.strategy, "device", None))
    one = Distribution(options={} if device is None else {"device": device})
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
    if how.compile:
        one = dataclasses.replace(one, compile=how.compile)
        add("+ compile", distribution=one)
    if dataclasses.replace(how, asked=False) != one:
        add(f"+ {_distribution_name(how)}", distribution=how)
    return [*found, Variant(LOADER, current, "loader"), Variant(MODEL, current, "model")]


def _distribution_name(how: Distribution) -> str:
    parts = [f"{how.name} × {how.devices}"] if how.name != "single" else []
    parts += [f"accumulate {how.accumulate}"] if how.accumulate > 1 else []
    parts += [f"clip_norm {how.clip_norm:g}"] if how.clip_norm is not None else []
    return ", ".join(parts) or how.name


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
    if not seconds > 0:
        raise PlanError(f"seconds={seconds} must be positive.")
    if under_torchrun():
        raise PlanError("The ledger starts its ranks itself, between other turns. Start it without torchrun.")
    begin = perf_counter()
    plan = pipeline.plan()
    pipeline = with_files(pipeline, progress)
    bar = tqdm(desc="ledger: warming up", unit=" turns", disable=not progress, leave=False)
    with ExitStack() as stack:
        stack.callback(bar.close)
        takers = [_taker(group, stack) for group in _groups(pipeline)]
        batches = _warm_up(takers, begin + seconds, bar)
        rounds = _measure_rounds(takers, batches, begin + seconds, bar)
    assert pipeline.data is not None  # the plan has checked
    batches = rounds[0][PLAIN].images // pipeline.data.batch_size  # the data may have fewer
    return Ledger(
        rounds=rounds,
        facts={
            "recipe": pipeline.recipe,
            "plan": plan.to_dict()["steps"],
            "batches_per_turn": batches,
            "seconds": round(perf_counter() - begin, 1),
            "provenance": provenance(),
        },
    )


TakeTurns = Callable[[int, int, bool], dict[str, Turn]]
"""Runs turns by name: the epoch (which decides the samples), the number of global batches, backwards or not."""


def _groups(pipeline: Pipeline) -> list[list[Variant]]:
    """The variants in order; those of one and the same pipeline are one group, which is built once."""
    groups: list[list[Variant]] = []
    for variant in variants(pipeline):
        if groups and groups[-1][0].pipeline is variant.pipeline:
            groups[-1].append(variant)
        else:
            groups.append([variant])
    return groups


def _taker(group: list[Variant], stack: ExitStack) -> TakeTurns:
    """How a group takes its turns: in this process, kept built; or on ranks that start for each round."""
    pipeline, kinds = group[0].pipeline, {variant.name: variant.kind for variant in group}
    devices = pipeline.distribution.devices
    if devices == 1:
        with seeded(pipeline.seed):
            built = stack.enter_context(build(pipeline))
        take_turn(built, "train", 0, MIN_BATCHES)  # warms up
        return partial(_take_turns, built, kinds)

    def launched(epoch: int, batches: int, backwards: bool) -> dict[str, Turn]:
        return launch(_turns_on_rank, pipeline, kinds, epoch, batches, backwards, devices=devices)[0]

    return launched


def _turns_on_rank(
    pipeline: Pipeline, kinds: dict[str, Kind], epoch: int, batches: int, backwards: bool
) -> dict[str, Turn]:
    with seeded(pipeline.seed), build(pipeline) as built:
        take_turn(built, "train", 0, MIN_BATCHES)  # the ranks are new: warm them up, too
        return _take_turns(built, kinds, epoch, batches, backwards)


def _take_turns(
    built: Built, kinds: dict[str, Kind], epoch: int, batches: int, backwards: bool
) -> dict[str, Turn]:
    names = list(kinds)[:: -1 if backwards else 1]
    return {name: take_turn(built, kinds[name], epoch, batches) for name in names}


def take_turn(built: Built, kind: Kind, epoch: int, batches: int) -> Turn:
    """Trains on (or only loads, or only computes) `batches` global batches, and times it."""
    loader, engine = built.train, built.engine
    batch_size = loader.settings.batch_size
    batches = min(batches, loader.samples // batch_size)
    # One batch is loaded to its end, so that no loader works ahead while the model alone is measured.
    loader.set_indices(range((1 if kind == "model" else batches) * batch_size))
    loader.set_epoch(epoch)
    source: Any = list(loader) * batches if kind == "model" else loader
    engine.barrier()
    start = perf_counter()
    if kind == "loader":
        images = sum(len(images) for images, _ in loader) * engine.world_size
        waited = perf_counter() - start
    else:
        built.methods.begin(engine, batches)
        stats = train_epoch(engine, source, built.loss, methods=built.methods)
        images, waited = stats.images, stats.waited
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    seconds = perf_counter() - start
    return Turn(images=images, seconds=seconds, waited=waited)


def _warm_up(takers: list[TakeTurns], deadline: float, bar: Any) -> int:
    """Runs every variant once more, and chooses how many batches a turn has so that the rounds fit the time."""
    start = perf_counter()
    turns = _round(takers, 0, MIN_BATCHES, bar)
    training = sum(turn.seconds for turn in turns.values())
    overhead = perf_counter() - start - training  # ranks that start, mostly
    per_round = (deadline - perf_counter()) / AIM_ROUNDS - overhead
    return max(int(MIN_BATCHES * per_round / training), MIN_BATCHES)


def _measure_rounds(
    takers: list[TakeTurns], batches: int, deadline: float, bar: Any
) -> list[dict[str, Turn]]:
    rounds: list[dict[str, Turn]] = []
    longest = 0.0
    while len(rounds) < MIN_ROUNDS or (perf_counter() + longest < deadline and len(rounds) < MAX_ROUNDS):
        start = perf_counter()
        bar.set_description(f"ledger: round {len(rounds) + 1}")
        rounds.append(_round(takers, len(rounds) + 1, batches, bar))
        longest = max(longest, perf_counter() - start)
    return rounds


def _round(takers: list[TakeTurns], number: int, batches: int, bar: Any) -> dict[str, Turn]:
    """One turn of every variant, by name, in the order of the rows."""
    backwards = number % 2 == 0  # every second round, so that none always follows the same neighbour
    found: list[dict[str, Turn]] = []
    for take in takers[:: -1 if backwards else 1]:
        found.append(take(number, batches, backwards))
        bar.update(len(found[-1]))
    turns = [turn for group in found for turn in group.items()]
    return dict(turns[:: -1 if backwards else 1])
