"""What the ledger measures: plain PyTorch, each stage in turn, only one stage, the full pipeline without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ...errors import DrivetrainError
from ...transforms import Transform
from ..spec.config import DistributedConfig
from ..spec.pipeline_spec import PipelineSpec
from ..spec.resolve import ResolvedPlan, resolve
from . import data as identity
from .data import COPY, EXTRAS, LOADER, MODEL, PLAIN, SPLIT, VariantId, only, without


@dataclass(frozen=True)
class Variant:
    """A pipeline to measure, and which variant it is."""

    id: VariantId
    spec: PipelineSpec

    @cached_property
    def plan(self) -> ResolvedPlan:
        """The plan, made and checked at first use; see `resolve` for the errors."""
        return resolve(self.spec)


@dataclass(frozen=True)
class Stage:
    """One thing that the pipeline adds to plain PyTorch: its name, and a function that adds it."""

    name: str
    add: Callable[[PipelineSpec], PipelineSpec]


def plain(plan: ResolvedPlan) -> PipelineSpec:
    """Plain PyTorch on the same model, data and optimizer: DataLoader, NCHW, fp32, one device, no extras.

    What acts in evaluation only (TestTimeFlip) stays: it is no stage of training, and accuracies compare with it.
    """
    device = plan.distribution.device
    one = DistributedConfig(options={} if device is None else {"device": device})
    kept = tuple(t for t in plan.transforms if t.kind == "evaluation")
    data = dataclasses.replace(plan.data, loader="torch")
    return plan.spec.replace(data=data, transforms=kept, distribution=one)


def stages(plan: ResolvedPlan) -> list[Stage]:
    """What the pipeline adds to plain PyTorch, in the plan's order."""
    data, how = plan.data, plan.distribution
    found = []
    if data.loader == "ffcv":
        found.append(Stage("FFCV loader", lambda spec: spec.replace(data=data)))
    found += [
        Stage(type(transform).__name__, partial(_transformed, transform=transform))
        for transform in plan.transforms
        if transform.kind != "evaluation"
    ]
    one = plain(plan).distributed
    if how.precision != one.precision:
        found.append(Stage(how.precision, lambda spec: _distributed(spec, precision=how.precision)))
    if how.compile:
        found.append(Stage("compile", lambda spec: _distributed(spec, compile=how.compile)))
    if dataclasses.replace(how, precision=one.precision, compile=one.compile) != one:
        found.append(Stage(_distribution_name(how), lambda spec: _strategy(spec, how)))
    return found


def _transformed(spec: PipelineSpec, transform: Transform) -> PipelineSpec:
    return spec.replace(transforms=(*spec.transforms, transform))


def _distributed(spec: PipelineSpec, **changes: Any) -> PipelineSpec:
    return spec.replace(distribution=dataclasses.replace(spec.distributed, **changes))


def _strategy(spec: PipelineSpec, how: DistributedConfig) -> PipelineSpec:
    """The strategy and its options, on top of the pipeline's own precision and compiling."""
    own = spec.distributed
    return spec.replace(distribution=dataclasses.replace(how, precision=own.precision, compile=own.compile))


def _distribution_name(how: DistributedConfig) -> str:
    parts = [f"{how.name} × {how.devices}"] if how.name != "single" else []
    parts += ["activation checkpointing"] if how.activation_checkpointing else []
    parts += [f"accumulate {how.accumulate}"] if how.accumulate > 1 else []
    parts += [f"clip_norm {how.clip_norm:g}"] if how.clip_norm is not None else []
    return ", ".join(parts) or how.name


def _with_stages(spec: PipelineSpec, chosen: Iterable[Stage]) -> PipelineSpec:
    for stage in chosen:
        spec = stage.add(spec)
    return spec


def in_turn(plan: ResolvedPlan) -> list[Variant]:
    """Plain PyTorch, then each stage on top of those before it, up to the full pipeline."""
    found = [Variant(PLAIN, plain(plan))]
    for stage in stages(plan):
        found.append(Variant(identity.in_turn(stage.name), stage.add(found[-1].spec)))
    return found


def of_the_whole(whole: PipelineSpec, *, copies: bool) -> list[Variant]:
    """What else the full pipeline runs: the ceilings, where its time goes, and what `fit`'s extras cost.

    Args:
        copies: whether its batches are copied to a device.
    """
    return [Variant(one, whole) for one in (LOADER, MODEL, *([COPY] if copies else []), SPLIT, EXTRAS)]


def variants(plan: ResolvedPlan, *, copies: bool = False) -> list[Variant]:
    """What every ledger measures: the stages in turn, and the trials that only the full pipeline takes."""
    found = in_turn(plan)
    return found + of_the_whole(found[-1].spec, copies=copies)


def alone_and_without(plan: ResolvedPlan) -> list[Variant]:
    """Only one stage, and the full pipeline without one; those that the stages in turn do not measure already."""
    start, found = plain(plan), stages(plan)
    one = [Variant(only(stage.name), stage.add(start)) for stage in found[1:]]
    less = [
        Variant(without(stage.name), _with_stages(start, [s for s in found if s is not stage]))
        for stage in found[:-1]
    ]
    return [*one, *less] if len(found) > 2 else one


def possible(found: Iterable[Variant]) -> list[Variant]:
    """Those that have a plan: a stage may need another one, or not go with plain PyTorch."""
    kept = []
    for variant in found:
        with suppress(DrivetrainError):
            _ = variant.plan  # raises if there is none
            kept.append(variant)
    return kept
