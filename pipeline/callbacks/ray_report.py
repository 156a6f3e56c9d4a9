"""`RayReport`: report each epoch to a trial of Ray Tune, whose scheduler can end it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ...common.errors import PlanError, require, suggest
from ..telemetry.history import COLUMNS
from .callback import Callback, RunOptions, RunView
from .monitor import check_same_process


class RayReport(Callback):
    """Report the values of each epoch to a trial of Ray Tune: `ray.tune.report({...})`.

    If Tune's scheduler or stop condition ends the trial, the run stops after that epoch like any run that a callback
    stops, and `fit` ends the trial's function instead of returning. Tune does not wait for it: its process may be gone
    before all files of the run are written. Epochs without an evaluation (`fit(eval_every=…)`)
    are reported only if `metrics` needs none.

    Args:
        metrics: names of the values to report: metrics of the evaluation, such as `"top1"` and `"val_loss"`, and fields
            of an `Epoch`, such as `"loss"`. Default: all, so that Tune's results have every number.

    Raises:
        PlanError: for an invalid value; from `fit`, for an unknown name, outside of a trial, or if `fit` would start
            ranks in other processes.
        MissingExtra: from `fit`, without Ray Tune.

    Example::

        >>> def trial(config):
        ...     tuned = pipeline.optimize("sgd", lr=config["lr"])
        ...     tuned.fit(epochs=8, callbacks=[RayReport()], progress=False)
        >>> # tune.Tuner(trial, param_space={"lr": tune.loguniform(0.01, 1)}, …).fit()
    """

    def __init__(self, metrics: Sequence[str] = ()) -> None:
        if not isinstance(metrics, list | tuple) or not all(isinstance(name, str) for name in metrics):
            raise PlanError(f"RayReport: metrics={metrics!r:.60} must be a list of names of metrics.")
        self.metrics = tuple(metrics)
        self._needs_evaluation = False
        self._ended: SystemExit | None = None
        self._tune: Any = None

    def check(self, run: RunOptions) -> None:
        known = (*(name for name in COLUMNS if name != "val_loss"), *run.metrics)
        for name in self.metrics:
            if name not in known:
                raise PlanError(f"RayReport: no metric is named {name!r}.{suggest(name, known)}")
        check_same_process("RayReport", run, "its trial")
        self._needs_evaluation = any(name in run.metrics for name in self.metrics or run.metrics)
        self._tune = require("ray.tune", "ray", "report to Ray Tune")
        with warnings.catch_warnings(action="ignore"):
            trial = self._tune.get_context().get_trial_id()
        if trial is None:
            raise PlanError("RayReport: this is not a trial. Call fit in the function that tune.Tuner runs.")

    def on_fit_start(self, view: RunView) -> None:  # noqa: ARG002
        self._ended = None

    def on_epoch_end(self, view: RunView) -> None:
        values = view.history[-1].values()
        if view.rank or (self._needs_evaluation and "val_loss" not in values):
            return
        try:
            self._tune.report({name: values[name] for name in self.metrics or values if name in values})
        except SystemExit as end:  # how Tune ends a function
            self._ended = end
            view.stop(f"Ray Tune ended the trial after epoch {view.epoch}")

    def on_return(self) -> None:
        if self._ended is not None:
            raise self._ended
