"""How long the ranks of a training need to exchange its gradients, and nothing else."""

from __future__ import annotations

from time import perf_counter

from ...common.budget import OutOfTime
from ...common.errors import StrategyError
from ...strategies.devices import rank_device
from ...strategies.launching.speed import all_reduce_speed
from ..describe.resolve import ResolvedPlan
from ..measuring.runner import on_ranks
from ..training.build import build_model


def collective_seconds(plan: ResolvedPlan, deadline: float) -> float:
    """Return the median seconds of an all-reduce of all gradients on the ranks of this pipeline: the least that a
    step without overlap communicates.

    Raises:
        OutOfTime: at the deadline, in `perf_counter` time.
        StrategyError: if a rank fails.
    """
    model, _ = build_model(plan.spec, plan.transforms)
    size = 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)
    del model
    left = max(deadline - perf_counter(), 0.0)
    try:
        return max(on_ranks(plan, left, _median, size, plan.distribution.device))
    except StrategyError:
        if perf_counter() >= deadline:
            raise OutOfTime from None
        raise


def _median(size: int, device: str) -> float:
    return all_reduce_speed(size, rank_device(device)).median
