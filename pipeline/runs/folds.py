"""Cross-validation: a training for each part of the data that is held out, and what they say together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ...common.checks import check_whole
from ...common.errors import PlanError
from ...common.storage.addresses import is_address
from ...common.table import Table
from ..describe.pipeline_spec import PipelineSpec
from ..tasks.metrics import format_metric
from ..telemetry.history import History, Units
from .analysis.errors import Errors, pooled
from .config import FitConfig
from .fit import fit


@dataclass(frozen=True, eq=False)
class CrossValidation:
    """What the runs of all folds reached.

    Attributes:
        metrics: of each fold, `val_loss` and those of the task's metrics that are defined on its part.
        histories: of each fold's training.
        errors: the predictions of all folds together: every sample was predicted once, by a model that was not trained
            on it. `errors.samples` has its index in the training data. The only sample of a class is in no fold.
        units: units of the metrics that are shares, by name.

    Example::

        >>> found = pipeline.cross_validate(folds=2, epochs=1, progress=False)
        >>> found.mean.keys() == found.std.keys()
        True
    """

    metrics: tuple[Mapping[str, float], ...]
    histories: tuple[History, ...] = field(repr=False)
    errors: Errors = field(repr=False)
    units: Units = field(default_factory=dict, repr=False)

    @property
    def mean(self) -> dict[str, float]:
        """The mean of each metric over the folds that have it."""
        return {name: fmean(values) for name, values in self._values().items()}

    @property
    def std(self) -> dict[str, float]:
        """The standard deviation of each metric over the folds that have it, if those are two or more, with n - 1. The
        folds share training data, so it is not that of independent runs (Bengio and Grandvalet 2004)."""
        return {name: stdev(values) for name, values in self._values().items() if len(values) > 1}

    def _values(self) -> dict[str, list[float]]:
        names = dict.fromkeys(name for each in self.metrics for name in each)
        return {name: [each[name] for each in self.metrics if name in each] for name in names}

    def table(self) -> Table:
        counts, folds = {name: len(values) for name, values in self._values().items()}, len(self.metrics)
        few = [f"{name}: {count} of {folds} folds" for name, count in counts.items() if count < folds]
        caption = f"Undefined in the other folds: {', '.join(few)}." if few else ""
        rows = [(f"fold {n}", *self._shown(each)) for n, each in enumerate(self.metrics)]
        last = [("mean", *self._shown(self.mean)), ("std", *self._shown(self.std))]
        return Table(("", *counts), [*rows, *last], caption=caption, figures=True, line_after=len(rows))

    def _shown(self, metrics: Mapping[str, float]) -> list[str]:
        return [
            format_metric(metrics[name], self.units.get(name)) if name in metrics else "" for name in self._values()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        folds = [dict(each) for each in self.metrics]
        return {"folds": folds, "mean": self.mean, "std": self.std, "errors": self.errors.to_dict()}

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


def cross_validate(spec: PipelineSpec, folds: int, options: Mapping[str, Any]) -> CrossValidation:
    check_whole("folds", folds, PlanError, 2)
    if spec.data is None:
        raise PlanError("The pipeline has no data. Add .load('train.beton', batch_size=…, image_size=…).")
    out = FitConfig.of(options).out
    configs = []
    for fold in range(folds):
        data = dataclasses.replace(spec.data, val=None, val_split=None, folds=folds, fold=fold)
        place: str | Path | None = None
        if out is not None:  # stores would keep a second "/" in the names of files
            place = f"{str(out).rstrip('/')}/fold-{fold}" if is_address(out) else Path(out) / f"fold-{fold}"
        configs.append((spec.replace(data=data), FitConfig.of({**options, "out": place})))
    found = [_trained(*each) for each in configs]  # the models of earlier folds are not kept
    histories = tuple(each for each, *_ in found)
    metrics = tuple(each for _, each, _ in found)
    return CrossValidation(metrics, histories, pooled([each for *_, each in found]), histories[0].units)


def _trained(spec: PipelineSpec, config: FitConfig) -> tuple[History, dict[str, float], Errors]:
    result = fit(spec, config)
    return result.history, result.metrics, result.errors()
