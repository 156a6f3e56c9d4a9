"""The variants of a ledger: plain PyTorch, the stages in turn, single stages, the full pipeline without one."""

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...common.errors import DrivetrainError
from ...transforms import Transform
from ..describe.config import DistributedConfig
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import ResolvedPlan
from ..ledger.variant import COPY, EXTRAS, LOADER, MODEL, PLAIN, SPLIT, only, other, without
from ..ledger.variant import in_turn as added_in_turn
from ..optim.config import OptionalGroups
from .runner import Variant


@dataclass(frozen=True)
class Stage:
    name: str
    add: Callable[[PipelineSpec], PipelineSpec]


def plain(plan: ResolvedPlan) -> PipelineSpec:
    """Return plain PyTorch with the same model, data and optimizer: DataLoader, NCHW, fp32, one device, no extras.
    Transforms of evaluation stay: they are not stages of training, and accuracies remain comparable."""
    device = plan.distribution.device
    one = DistributedConfig(options={} if device is None else {"device": device})
    kept = tuple(t for t in plan.transforms if t.kind == "evaluation")
    data = dataclasses.replace(plan.data, loader="torch")
    optimization = plan.spec.optimization
    if optimization is not None and optimization.groups:
        optimization = dataclasses.replace(optimization, groups=OptionalGroups(optimization.groups))
    return plan.spec.replace(data=data, transforms=kept, distribution=one, optimization=optimization)


def stages(plan: ResolvedPlan) -> list[Stage]:
    data, how = plan.data, plan.distribution
    added = []
    if data.loader != "torch":
        name = "FFCV loader" if data.loader == "ffcv" else f"{data.loader} loader"
        added.append(Stage(name, lambda spec: spec.replace(data=data)))
    for transform in plan.transforms:
        if transform.kind != "evaluation":
            added.append(Stage(type(transform).__name__, partial(with_transform, transform=transform)))
    one = plain(plan).distributed
    if how.precision != one.precision:
        added.append(Stage(how.precision, lambda spec: with_distribution(spec, precision=how.precision)))
    if how.compile:
        compiled = {name: getattr(how, name) for name in _compiled(how)}
        added.append(Stage("compile", lambda spec: with_distribution(spec, **compiled)))
    # Neither what "auto" is for one process nor the patience of its collectives is a stage.
    if _with_stages_of(how, one) != dataclasses.replace(one, devices=how.devices, timeout=how.timeout):
        name = _distribution_name(how)
        added.append(Stage(name, lambda spec: spec.replace(distribution=_with_stages_of(how, spec.distributed))))
    return added


def with_transform(spec: PipelineSpec, transform: Transform) -> PipelineSpec:
    return spec.replace(transforms=(*spec.transforms, transform))


def with_data(spec: PipelineSpec, **changes: Any) -> PipelineSpec:
    assert spec.data is not None
    return spec.replace(data=dataclasses.replace(spec.data, **changes))


def with_distribution(spec: PipelineSpec, **changes: Any) -> PipelineSpec:
    return spec.replace(distribution=dataclasses.replace(spec.distributed, **changes))


def _compiled(how: DistributedConfig) -> list[str]:
    """Return the names of the options that the compiler follows."""
    return ["compile", *(["activation_checkpointing"] if how.memory_budget is not None else [])]


def _with_stages_of(how: DistributedConfig, own: DistributedConfig) -> DistributedConfig:
    """Return `how` with the options of `own` that are stages of their own."""
    return dataclasses.replace(how, **{name: getattr(own, name) for name in ("precision", *_compiled(how))})


def _distribution_name(how: DistributedConfig) -> str:
    names = [f"{how.name} × {how.ranks}"] if how.name != "single" else []
    names += ["activation checkpointing"] if how.activation_checkpointing and how.memory_budget is None else []
    names += [f"accumulate {how.accumulate}"] if how.accumulate > 1 else []
    names += [f"clip_norm {how.clip_norm:g}"] if how.clip_norm is not None else []
    return ", ".join(names) or how.name


def in_turn(plan: ResolvedPlan) -> list[Variant]:
    rows = [Variant(PLAIN, plain(plan))]
    for stage in stages(plan):
        rows.append(Variant(added_in_turn(stage.name), stage.add(rows[-1].spec)))
    # The full pipeline has all parameters that its groups name.
    rows[-1] = Variant(rows[-1].id, rows[-1].spec.replace(optimization=plan.spec.optimization))
    return rows


def variants(plan: ResolvedPlan, *, copies: bool = False) -> list[Variant]:
    rows = in_turn(plan)
    others = (LOADER, MODEL, *([COPY] if copies else []), SPLIT, EXTRAS)
    return rows + [Variant(one, rows[-1].spec) for one in others]


def alone_and_without(plan: ResolvedPlan) -> list[Variant]:
    start, added = plain(plan), stages(plan)
    one = [Variant(only(stage.name), stage.add(start)) for stage in added[1:]]
    if len(added) <= 2:
        return one
    less = []
    for stage in added[:-1]:
        spec = start
        for each in added:
            spec = spec if each is stage else each.add(spec)
        less.append(Variant(without(stage.name), spec))
    return [*one, *less]


def with_loader(plan: ResolvedPlan, loader: str) -> list[Variant]:
    spec = with_data(plan.spec, loader=loader)
    return [Variant(one, spec) for one in other(loader)]


def possible(candidates: Iterable[Variant]) -> list[Variant]:
    """Return the variants with a valid plan: a stage may require another one, or not work with plain PyTorch."""
    kept = []
    for variant in candidates:
        with suppress(DrivetrainError):
            _ = variant.plan  # raises if there is none
            kept.append(variant)
    return kept
