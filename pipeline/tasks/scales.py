"""The direction and the unit of a metric: how to compare and print its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from ...common.errors import PlanError
from .metrics import Unit
from .task import Task

if TYPE_CHECKING:
    from torchmetrics import Metric


@dataclass(frozen=True)
class Scale:
    higher_is_better: bool | None  # None if nobody declares it
    unit: Unit | None = None  # None for numbers that are not shares


def scale_of(task: Task, name: str, metric: Metric) -> Scale:
    """Return what the task declares, else the metric's class, else torchmetrics: its metrics of classification and
    segmentation, better when higher and drawn from 0 to 1, are fractions. Only this decides."""
    higher = task.higher_is_better.get(name, getattr(metric, "higher_is_better", None))
    unit = task.units.get(name, getattr(metric, "unit", None))
    if higher not in (True, False, None) or unit not in (*get_args(Unit), None):
        raise PlanError(
            f"{task}: the metric {name!r} declares higher_is_better={higher!r:.40} and unit={unit!r:.40}. Declare True "
            f"or False, and {' or '.join(map(repr, get_args(Unit)))}."
        )
    if unit is None and higher and _ranges_to_one(metric):
        unit = "fraction"
    return Scale(higher, unit)


def _ranges_to_one(metric: Metric) -> bool:
    own = type(metric).compute.__module__.startswith(("torchmetrics.classification", "torchmetrics.segmentation"))
    return own and (metric.plot_lower_bound, metric.plot_upper_bound) == (0.0, 1.0)


def scales(task: Task) -> dict[str, Scale]:
    losses = dict.fromkeys(("loss", "val_loss"), Scale(higher_is_better=False))
    meters = task.meters(10)  # on whose number of outputs they do not depend
    return losses | {name: scale_of(task, name, meter) for name, meter in meters.items()}


def check_monitor(task: Task) -> None:
    if task.monitor == "val_loss" or task.declares_monitor:
        return
    if scales(task)[task.monitor].higher_is_better is None:
        raise PlanError(
            f"{task} monitors {task.monitor!r}, and nothing declares whether higher is better, so the best epoch is "
            f"unknown. Set higher_is_better = True or False in the metric's class, or higher_is_better = "
            f"{{{task.monitor!r}: …}} in the task's, or pass another monitor, such as 'val_loss'."
        )


def check_comparable(task: Task, option: str) -> None:
    """Differences of a share are percentage points."""
    if scales(task)[task.monitor].unit is None:
        raise PlanError(
            f"{option} compares a share such as top1, and {task} monitors {task.monitor!r}, which declares no unit. "
            "Set unit = 'fraction' or 'percent' in the metric's class, or units = {…} in the task's, or choose another "
            "monitor of the task."
        )
