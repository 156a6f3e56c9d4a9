"""Evaluate weights with a pipeline's model and validation data, without training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ...common.errors import PlanError
from ..describe.config import source_name
from ..describe.pipeline_spec import PipelineSpec
from ..describe.resolve import ResolvedPlan, resolve
from ..training.build import plain_torch, resolve_data
from ..training.loop import evaluate
from .initial import InitialWeights, WeightsArg, check_source
from .ranks import built_here, on_ranks


@plain_torch()
def evaluate_weights(
    spec: PipelineSpec, weights: WeightsArg, data: str | Path | None = None
) -> dict[str, float]:
    """Return the metrics of weights; see `Pipeline.evaluate`."""
    if spec.data is not None and data is not None:
        spec = spec.replace(data=dataclasses.replace(spec.data, val=source_name(data, "data")))
    plan = resolve(spec)
    if plan.data.val is None:
        raise PlanError("There is no validation data to evaluate. Pass a second file to load() (--val).")
    check_source(weights)
    return on_ranks(resolve_data(plan, progress=False), evaluate_rank, weights)


def evaluate_rank(plan: ResolvedPlan, weights: WeightsArg) -> dict[str, float]:
    """Evaluate on this rank; every rank returns the metrics over all."""
    initial = InitialWeights(weights, plan.transforms, strict=True)
    with built_here(plan, initial) as built:
        assert built.val is not None
        return evaluate(built.engine, built.val, built.hooks, plan.task)
