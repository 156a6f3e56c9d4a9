"""The changes that tuning tries: they make a training faster, and keep what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ... import machine
from ...transforms import ChannelsLast
from ..spec.cuda_settings import uses_gpu
from ..spec.kinds import find
from ..spec.pipeline_spec import PipelineSpec
from ..spec.resolve import ResolvedPlan
from ..spec.rules import family

Binds = Literal["data", "step", "communication"]
"""What a change makes faster."""

EQUAL = ("ddp", "zero_redundancy", "fsdp")
"""Strategies with the same numbers, but for the order of sums."""
AHEAD = (1, 6)
MICROBATCHES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    """A change.

    Attributes:
        name: that no other has, such as `"workers=4"`.
        binds: what it makes faster.
        change: returns a pipeline with it.
    """

    name: str
    binds: Binds
    change: Callable[[PipelineSpec], PipelineSpec]


def candidates(plan: ResolvedPlan) -> list[Candidate]:
    """Return the changes to try on a pipeline, those of loading first."""
    data, how = plan.data, plan.distribution
    cores = machine.rank_cores()
    own = cores if data.workers is None else data.workers
    found = [
        _data("workers", count)
        for count in sorted({1, max(cores // 2, 1), max(cores - 1, 1), cores, 2 * cores} - {own})
    ]
    found += [_data("batches_ahead", count) for count in AHEAD if count != data.batches_ahead]
    if find(plan.transforms, ChannelsLast) is None:
        found.append(Candidate("ChannelsLast", "step", _channels_last))
    if not how.compile:
        found.append(_how("compile", True, "step"))
    if uses_gpu(how):
        modes = {True, False} - {how.cudnn_benchmark}
        found += [_how("cudnn_benchmark", mode, "step") for mode in sorted(modes, reverse=True)]
        if how.compile != "reduce-overhead":
            found.append(_how("compile", "reduce-overhead", "step"))
    if how.ranks > 1 and family(how.name) in ("ddp", "fsdp"):
        found += [_how("strategy", name, "communication") for name in EQUAL if name != how.name]
    return found


def fitting(plan: ResolvedPlan) -> list[Candidate]:
    """Return the changes that make a training fit into memory: the fewest microbatches first, and recomputed
    activations only after them."""
    share = plan.data.batch_size // plan.distribution.ranks
    numbers = [n for n in MICROBATCHES if share % n == 0 and n > plan.distribution.accumulate]
    found = [_how("accumulate", number, "step") for number in numbers]
    if not plan.distribution.activation_checkpointing:
        found.append(_how("activation_checkpointing", True, "step"))
    return found


def ordered(found: list[Candidate], bound: Binds) -> list[Candidate]:
    """Return the changes with those of what binds first."""
    return sorted(found, key=lambda one: one.binds != bound)


def _data(name: str, value: Any) -> Candidate:
    def change(spec: PipelineSpec) -> PipelineSpec:
        assert spec.data is not None
        return spec.replace(data=dataclasses.replace(spec.data, **{name: value}))

    return Candidate(f"{name}={value}", "data", change)


def _how(name: str, value: Any, binds: Binds) -> Candidate:
    def change(spec: PipelineSpec) -> PipelineSpec:
        return spec.replace(distribution=dataclasses.replace(spec.distributed, **{name: value}))

    return Candidate(f"{name}={value!r}", binds, change)


def _channels_last(spec: PipelineSpec) -> PipelineSpec:
    return spec.replace(transforms=(*spec.transforms, ChannelsLast()))
