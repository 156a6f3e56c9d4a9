"""`OptunaPruning`: report each epoch to a trial of Optuna, which can prune it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.errors import PlanError, require
from .callback import Callback, RunOptions, RunView
from .monitor import check_monitor, check_same_process, direction


class OptunaPruning(Callback):
    """Report a metric to a trial of Optuna after each evaluated epoch, and end the run if the study's pruner says so.

    A pruned run ends like any run that a callback stops: its weights, history and checkpoint are complete, and
    `history.stopped` names Optuna. Then `fit` raises `optuna.TrialPruned`, also when that run is resumed. After the
    last epoch nothing is pruned: the trial is complete.

    Args:
        trial: the trial that Optuna passes to the objective. On ranks that torchrun started, only rank 0's is used, and
            the others pass None: there, `fit` returns the result of a pruned run.
        monitor: the metric of the evaluation that the objective returns, such as `"top1"` or `"val_loss"`; or `"loss"`,
            the mean training loss of an epoch.

    Attributes:
        pruned: why the trial was pruned; None if it was not.

    Raises:
        PlanError: for an invalid value; from `fit`, for an unknown metric, a study with several objectives or in the
            other direction than the metric's, or if `fit` would start ranks in other processes.

    Example::

        >>> import optuna
        >>> def objective(trial):
        ...     rate = trial.suggest_float("lr", 0.01, 1.0, log=True)
        ...     pruning = OptunaPruning(trial, "top1")
        ...     result = pipeline.optimize("sgd", lr=rate).fit(epochs=2, callbacks=[pruning], progress=False)
        ...     return result.metrics["top1"]
        >>> study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner())
        >>> study.optimize(objective, n_trials=1)
    """

    def __init__(self, trial: Any, monitor: str) -> None:
        if trial is not None and not (hasattr(trial, "report") and hasattr(trial, "should_prune")):
            raise PlanError(
                f"OptunaPruning: trial={trial!r:.60} is not a trial. Pass the one that study.optimize gives to the "
                "objective."
            )
        if not isinstance(monitor, str):
            raise PlanError(f"OptunaPruning: monitor={monitor!r:.60} must be the name of a metric.")
        self.trial, self.monitor = trial, monitor
        self.pruned: str | None = None

    def check(self, run: RunOptions) -> None:
        check_monitor("OptunaPruning", self.monitor, run)
        check_same_process("OptunaPruning", run, "its trial")
        study = getattr(self.trial, "study", None)  # a FixedTrial has none
        directions = [] if study is None else [each.name.lower() for each in study.directions]
        if len(directions) > 1:
            raise PlanError(
                f"OptunaPruning: Optuna does not prune a study with {len(directions)} objectives. Leave the callback "
                "out, or create a study with one direction."
            )
        higher = direction(self.monitor, run)
        wanted = "maximize" if higher else "minimize"
        if directions and higher is not None and directions != [wanted]:
            raise PlanError(
                f"OptunaPruning: the study's direction is {directions[0]!r}, but of {self.monitor!r}, "
                f"{'higher' if higher else 'lower'} is better. Use optuna.create_study(direction={wanted!r}), or "
                "monitor another metric."
            )

    def on_fit_start(self, view: RunView) -> None:
        self.pruned = None
        if view.rank == 0 and self.trial is None:
            raise PlanError("OptunaPruning: trial=None on rank 0. Pass the objective's trial there.")

    def on_epoch_end(self, view: RunView) -> None:
        self.pruned = None  # a pruned run that is continued has state of its own
        value = view.history[-1].values().get(self.monitor)
        if view.rank or value is None:
            return
        self.trial.report(value, view.epoch)
        if view.epoch < view.epochs and self.trial.should_prune():
            self.pruned = f"Optuna pruned the trial after epoch {view.epoch}, at {self.monitor} {value:.6g}"
            view.stop(self.pruned)

    def on_return(self) -> None:
        if self.pruned is not None:
            raise require("optuna", "optuna", "prune a trial").TrialPruned(self.pruned)

    def state_dict(self) -> dict[str, Any]:
        return {"pruned": self.pruned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.pruned = state["pruned"]
