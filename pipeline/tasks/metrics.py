"""Metrics of a task: torchmetrics objects, by name or as given, summed over batches and ranks.

torchmetrics is imported when metrics are made, because that takes a second.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...errors import PlanError, suggest

if TYPE_CHECKING:
    from torchmetrics import Metric

NAMES_OF_RUN = {
    "epoch", "loss", "val_loss", "images_per_s", "data_wait_fraction", "seconds", "lr", "skipped", "step", "metrics",
}  # fmt: skip
"""What the history, the log and the curves call their other values."""

_TOP = re.compile(r"top([1-9][0-9]*)")


def named(task: object, metrics: Any) -> dict[str, Any]:
    """Return the metrics of a task by name: each a name that the task knows, or a torchmetrics object.

    Raises:
        PlanError: for what is neither, or a name that the run uses itself.
    """
    if isinstance(metrics, Mapping):
        found = dict(metrics)
    else:
        entries = (metrics,) if isinstance(metrics, str) or callable(metrics) else tuple(metrics)
        found = {_name(entry): entry for entry in entries}
        if len(found) < len(entries):
            raise PlanError(f"{task}: two metrics have one name. Pass a dict of them, with a name for each.")
    for name, metric in found.items():
        if not isinstance(name, str) or not name.isidentifier() or name in NAMES_OF_RUN:
            raise PlanError(f"{task}: a metric cannot be named {name!r}. Choose another name.")
        if isinstance(metric, str):
            _check_known(task, metric)
        elif not _is_metric(metric):
            raise PlanError(
                f"{task}: {metric!r:.80} is not a metric. Pass names of {_known(task)}, or torchmetrics objects."
            )
    return found


def by_name(
    task: object, metrics: Mapping[str, Any], makers: Mapping[str, Callable[[int], Any]], width: int
) -> dict[str, Metric]:
    """Return new torchmetrics objects, for outputs of `width` values per image."""
    made = {}
    for name, metric in metrics.items():
        try:
            if isinstance(metric, str):
                made[name] = (makers.get(metric) or top(int(metric.removeprefix("top"))))(width)
            else:
                made[name] = copy.deepcopy(metric)
                made[name].reset()
        except (ValueError, TypeError, RuntimeError) as error:
            raise PlanError(
                f"{task}: the metric {name!r} cannot be made for {width} outputs: {error}"
            ) from error
    return made


def maker(kind: str, **options: Any) -> Callable[[int], Any]:
    """Return the function that makes a metric for outputs of so many values per image.

    Args:
        kind: class of `torchmetrics.classification`, which receives the number of values, or of
            `torchmetrics.regression`.
        options: further arguments of the class.
    """

    def make(width: int) -> Any:
        from torchmetrics import classification, regression

        if hasattr(classification, kind):
            return getattr(classification, kind)(width, validate_args=False, **options)
        return getattr(regression, kind)(**options)

    return make


def top(k: int) -> Callable[[int], Any]:
    """Return the function that makes the top-`k` accuracy for a number of classes, at most their number."""
    return lambda classes: maker("MulticlassAccuracy", average="micro", top_k=min(k, classes))(classes)


def higher_is_better(metric: Metric | None) -> bool:
    """Return whether a metric is better when it is higher; None is the loss. Undeclared: yes."""
    return metric is not None and metric.higher_is_better is not False


def compute(meters: Mapping[str, Metric], world_size: int) -> dict[str, float]:
    """Return the values over all samples of all ranks; undefined ones (NaN, infinite) are missing. Every rank must call
    it.

    A rank may have seen no sample. torchmetrics' own synchronisation would then wait for ever for metrics that keep
    their inputs, so the states are gathered here.

    Raises:
        PlanError: naming a metric that is not one number, or that cannot be merged over ranks.
    """
    if world_size > 1 and meters:
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, {name: state_of(metric) for name, metric in meters.items()})
        for name, metric in meters.items():
            pool(name, metric, [states[name] for states in everyone])
    values = {name: _number(name, metric) for name, metric in meters.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def state_of(metric: Metric) -> tuple[int, dict[str, Any]]:
    """Return the number of updates of a metric, and a copy of its state on the CPU."""
    state = {
        name: [each.cpu() for each in value] if isinstance(value, list) else value.cpu().clone()
        for name, value in metric.metric_state.items()
    }
    return metric.update_count, state


def pool(name: str, metric: Metric, states: list[tuple[int, dict[str, Any]]]) -> None:
    """Make the state of a metric that of all ranks."""
    device = metric.device
    metric.reset()
    for count, state in states:
        if not count:
            continue
        local = {
            key: [each.to(device) for each in value] if isinstance(value, list) else value.to(device)
            for key, value in state.items()
        }
        try:
            metric._update_count += count
            metric._computed = None
            metric.merge_state(local)
        except RuntimeError as error:
            raise PlanError(
                f"The metric {name!r} ({type(metric).__name__}) cannot be merged over ranks: {error} Train on one "
                "device, or choose another metric."
            ) from error


def _number(name: str, metric: Metric) -> float:
    value: Any = float("nan") if not metric.update_count else metric.compute()
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item())
    if isinstance(value, int | float):
        return float(value)
    raise PlanError(
        f"The metric {name!r} returns {value!r:.80}, but a history needs one number. Average it, e.g. with "
        "average='macro'."
    )


def _name(entry: object) -> str:
    if isinstance(entry, str):
        return entry
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(entry).__name__)
    return words.lower()


def _is_metric(value: object) -> bool:
    from torchmetrics import Metric

    return isinstance(value, Metric)


def _known(task: Any) -> list[str]:
    return [*task.METRICS]


def _check_known(task: Any, name: str) -> None:
    known = _known(task)
    if name not in known and not ("top1" in known and _TOP.fullmatch(name)):
        raise PlanError(f"{task}: no metric is named {name!r}.{suggest(name, known)}")
