"""Metrics of a task, summed over batches and ranks. torchmetrics is imported on use: it takes seconds, with what it
imports (torchvision, matplotlib, and transformers where it is installed)."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from ...common.errors import PlanError, suggest
from ...common.names import imported
from .nests import map_tensors

if TYPE_CHECKING:
    from torchmetrics import Metric

NAMES_OF_RUN = {  # what the history, the log and the curves call their other values
    "epoch", "loss", "val_loss", "images_per_s", "data_wait_fraction", "seconds", "lr", "skipped", "replaced", "step",
    "metrics",
}  # fmt: skip
_TOP = re.compile(r"top([1-9][0-9]*)")


def imported_classes(metrics: Any) -> Any:
    """Return what the user gave, with the classes in the place of `"package.module:Class"`."""
    if isinstance(metrics, Mapping):
        return {name: imported_classes(metric) for name, metric in metrics.items()}
    if isinstance(metrics, list | tuple):
        return tuple(map(imported_classes, metrics))
    return imported("metric", metrics) if isinstance(metrics, str) and ":" in metrics else metrics


def named(task: Any, metrics: Any) -> dict[str, Any]:
    """Return what the user gave by name: a name in `METRICS`, or a torchmetrics object."""
    if isinstance(metrics, Mapping):
        found = dict(metrics)
    else:
        entries = (metrics,) if isinstance(metrics, str) or callable(metrics) else metrics
        if not isinstance(entries, list | tuple):  # the order of a set, and so the monitor, differs from rank to rank
            raise PlanError(f"{task}: metrics={metrics!r:.80} must be a list of metrics, or a dict of them by name.")
        found = {_name(entry): entry for entry in entries}
        if len(found) < len(entries):
            raise PlanError(f"{task}: two metrics have one name. Pass a dict of them, with a name for each.")
    known = [*task.METRICS]
    for name, metric in found.items():
        if not isinstance(name, str) or not name.isidentifier() or name in NAMES_OF_RUN:
            raise PlanError(f"{task}: a metric cannot be named {name!r}. Choose another name.")
        if isinstance(metric, str):
            if metric not in known and not ("top1" in known and _TOP.fullmatch(metric)):
                raise PlanError(f"{task}: no metric is named {metric!r}.{suggest(metric, known)}")
            continue
        from torchmetrics import Metric

        found[name] = _created(task, metric)
        if not isinstance(found[name], Metric):
            remedy = f"Pass names of {known}, or torchmetrics objects or classes."
            raise PlanError(f"{task}: {metric!r:.80} is not a metric. {remedy}")
    return found


def _created(task: object, metric: Any) -> Any:
    """Return the object of a class; an object itself."""
    if not isinstance(metric, type):
        return metric
    try:
        return metric()
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{task}: the metric {metric.__name__} cannot be created without arguments: {error}. Pass an object, or a "
            "class of yours that sets them."
        ) from error


def by_name(
    task: object, metrics: Mapping[str, Any], makers: Mapping[str, Callable[[int], Any]], width: int
) -> dict[str, Metric]:
    made: dict[str, Any] = {}
    for name, metric in metrics.items():
        try:
            if isinstance(metric, str):
                made[name] = (makers.get(metric) or top(int(metric.removeprefix("top"))))(width)
            else:
                made[name] = copy.deepcopy(metric)
                made[name].reset()
        except (ValueError, TypeError, RuntimeError) as error:
            what = f"the metric {name!r} cannot be made for {width} outputs"
            raise PlanError(f"{task}: {what}: {error}") from error
    return made


def maker(kind: str, **options: Any) -> Callable[[int], Any]:
    """Return what makes a torchmetrics class: of `classification`, for so many values per image, or of `regression`."""

    def make(width: int) -> Any:
        from torchmetrics import classification, regression

        if hasattr(classification, kind):
            return getattr(classification, kind)(width, validate_args=False, **options)
        return getattr(regression, kind)(**options)

    return make


def r2(width: int) -> Any:  # noqa: ARG001 — the first batch shows it
    """Return torchmetrics' R², which takes sums of squares below 1e-4 for 0, whatever the targets' unit, and raises for
    one sample. Of equal targets, it is 1 if all predictions are right, else 0, as torchmetrics' and scikit-learn's."""
    from torchmetrics.regression import R2Score

    class R2(R2Score):
        def compute(self) -> torch.Tensor:
            if self.total < 2:
                return torch.tensor(torch.nan)
            squares: torch.Tensor = self.sum_squared_error  # of the targets
            around = squares - self.sum_error.square() / self.total
            of_equal = (self.residual == 0).to(squares.dtype)
            return torch.where(around > 1e-14 * squares, 1 - self.residual / around, of_equal).mean()

    return R2()


def mean_auroc(kind: str) -> Callable[[int], Any]:
    """Return what makes a torchmetrics class of AUROC, as the mean over the classes or labels that have positive and
    negative samples: of others it is undefined, and torchmetrics counts it as 0."""

    def make(width: int) -> Any:
        from torchmetrics import classification
        from torchmetrics.utilities import dim_zero_cat

        class MeanAUROC(getattr(classification, kind)):  # type: ignore[misc]
            unit = "fraction"

            def compute(self) -> torch.Tensor:
                with warnings.catch_warnings(action="ignore"):  # of what does not count here
                    each: torch.Tensor = super().compute()
                targets = dim_zero_cat(self.target)
                positive = targets.bincount(minlength=width) if targets.dim() == 1 else targets.sum(0)
                return each[(positive > 0) & (positive < len(targets))].mean()

        return MeanAUROC(width, average="none", validate_args=False)

    return make


def top(k: int) -> Callable[[int], TopK]:
    """For a number of classes, at most their number."""
    return lambda classes: TopK(min(k, classes))


class TopK:
    """The share of samples whose class is among the `k` highest outputs: torchmetrics' `MulticlassAccuracy` with
    `average="micro"`, of which it has what a run uses. Most runs need no other metric, and importing torchmetrics takes
    up to a third of a run's start."""

    higher_is_better, unit = True, "fraction"
    _reductions: ClassVar[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = dict.fromkeys(
        ("right", "total"), partial(torch.sum, dim=0)
    )

    def __init__(self, k: int) -> None:
        self._k, self.device = k, torch.device("cpu")
        self.reset()

    def reset(self) -> None:
        self.right, self.total = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._update_count = 0

    def to(self, device: torch.device) -> TopK:
        self.device, self.right, self.total = device, self.right.to(device), self.total.to(device)
        return self

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Of outputs `(B, C, …)` and targets `(B, …)`."""
        found = outputs.argmax(1, keepdim=True) if self._k == 1 else outputs.topk(self._k, 1).indices
        self.right = self.right + (found == targets.unsqueeze(1)).sum()
        self.total = self.total + targets.numel()
        self._update_count += 1

    def compute(self) -> torch.Tensor:
        share: torch.Tensor = self.right / self.total
        return share

    @property
    def update_count(self) -> int:
        return self._update_count

    @property
    def metric_state(self) -> dict[str, torch.Tensor]:
        return {"right": self.right, "total": self.total}


Unit = Literal["fraction", "percent"]
"""What the values of a metric are shares in: `"fraction"`, 0 to 1; `"percent"`, 0 to 100."""


def compute(meters: Mapping[str, Metric], world_size: int) -> dict[str, float]:
    """Return the values over all ranks, without NaN and infinite ones; every rank must call it. States are gathered
    here: torchmetrics would block if a rank has no sample, and thus no tensor to gather."""
    if world_size > 1 and meters:
        from ...strategies.launching.group import of_all_ranks

        everyone = of_all_ranks({name: state_of(metric) for name, metric in meters.items()}, world_size)
        for name, metric in meters.items():
            pool(name, metric, [states[name] for states in everyone])
    values = {name: _number(name, metric) for name, metric in meters.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


State = tuple[int, dict[str, Any]]  # the number of updates of a metric, and its state


def state_of(metric: Metric) -> list[State]:
    """Return copies on the CPU, also of the metrics that it contains."""
    return [
        (each.update_count, map_tensors(lambda tensor: tensor.cpu().clone(), each.metric_state))
        for each in _nested(metric)
    ]


def pool(name: str, metric: Metric, ranks: list[list[State]]) -> None:
    """Set the state to that of all ranks, by the reductions that it declares, as torchmetrics does, but without the
    ranks that saw no sample. `"mean"` is over the ranks; a function, or none, receives or keeps the stacked tensors."""
    for each, states in zip(_nested(metric), zip(*ranks, strict=True), strict=True):
        each.distributed_available_fn = _never  # `compute` would reduce over the ranks once more
        seen = [state for count, state in states if count]
        move = methodcaller("to", each.device)
        if not seen:
            continue
        try:
            for key, reduction in each._reductions.items():
                values = [map_tensors(move, state[key]) for state in seen]
                setattr(each, key, _reduced(values, reduction))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise PlanError(
                f"The metric {name!r} ({type(metric).__name__}) cannot be merged over ranks: {error}. Train on one "
                "device, or choose another metric."
            ) from error
        each._update_count, each._computed = sum(count for count, _ in states), None


def _nested(metric: Metric | TopK) -> list[Any]:
    if isinstance(metric, TopK):
        return [metric]
    from torchmetrics import Metric

    return [each for each in metric.modules() if isinstance(each, Metric)]


def takes_probabilities(metric: Any) -> bool:
    """Whether it is a classification metric of torchmetrics, which of logits decides batch by batch whether they are
    some: not if all are from 0 to 1. Those that only look for the largest output do not."""
    defined_in = type(metric).update.__module__ or ""  # None in executed text
    if not defined_in.startswith("torchmetrics.classification."):
        return False
    from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassStatScores

    return not isinstance(metric, MulticlassStatScores | MulticlassConfusionMatrix)


def of_numbers(metric: Any) -> bool:
    """Whether it is a regression metric of torchmetrics: the variance of R2Score is a difference of sums, which float32
    loses for numbers that are far from 0."""
    return (type(metric).update.__module__ or "").startswith("torchmetrics.regression.")


def _never() -> bool:
    return False


def _reduced(values: list[Any], reduction: Any) -> Any:
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        items = [item for value in values for item in value]
        return reduction(items) if items and reduction is not None else items
    # torchmetrics', which is not imported for it: of tensors whose lengths may differ.
    if getattr(reduction, "__name__", "") == "dim_zero_cat":
        return reduction(values)
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def check_value(name: str, metric: Metric) -> None:
    """Raise PlanError if a metric has another value than one number after its first update, here of two samples. If it
    cannot be computed of so few, nothing is known of it. The metric must not be used any further."""
    for each in _nested(metric):
        each.distributed_available_fn = _never
    try:
        with warnings.catch_warnings(action="ignore"):
            value = metric.compute()
    except Exception:  # a custom metric may raise anything
        return
    _as_number(name, value)


def _number(name: str, metric: Metric) -> float:
    return _as_number(name, float("nan") if not metric.update_count else metric.compute())


def _as_number(name: str, value: Any) -> float:
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
    kind = entry if isinstance(entry, type) else type(entry)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def format_metric(value: float, unit: Unit | None) -> str:
    if unit is None:
        return f"{value:.4g}"
    return f"{value:.2%}" if unit == "fraction" else f"{value:.2f}%"
