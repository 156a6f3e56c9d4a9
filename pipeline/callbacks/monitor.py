"""What callbacks that follow a metric check before any work: that it exists, its direction, and where they run."""

from __future__ import annotations

from ...common.errors import PlanError, suggest
from .callback import RunOptions

LOSS = "loss"
"""The mean training loss of an epoch, which needs no validation data."""


def check_monitor(callback: str, metric: str, run: RunOptions) -> None:
    """Raise PlanError unless `metric` is `"loss"` or one of the evaluation."""
    known = (LOSS, *run.metrics)
    if metric in known:
        return
    if not run.metrics:
        raise PlanError(
            f"{callback} monitors {metric!r}, but the run has no validation data. Pass a second file to load() "
            "(--val), or monitor 'loss'."
        )
    raise PlanError(f"{callback}: no metric is named {metric!r}.{suggest(metric, known)}")


def direction(metric: str, run: RunOptions) -> bool | None:
    """Return whether higher is better, as the task or the torchmetrics class declares it; None if neither does."""
    return False if metric == LOSS else run.higher_is_better.get(metric)


def check_same_process(callback: str, run: RunOptions, what: str) -> None:
    """Raise PlanError if `fit` starts the ranks, which would have only a copy of the search's object."""
    if run.starts_ranks:
        raise PlanError(
            f"{callback} talks to {what} in this process, but fit would start the ranks in others. Let each trial "
            "train on one device (distribute('single')), with several trials at a time, or start this program with "
            "torchrun."
        )
