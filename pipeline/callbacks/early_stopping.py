"""`EarlyStopping`: stop when a metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from ...common.checks import check_number, check_whole
from ...common.errors import PlanError, suggest
from .callback import Callback, RunOptions, RunView
from .monitor import LOSS, check_monitor, direction

Mode = Literal["auto", "min", "max"]


class EarlyStopping(Callback):
    """Stop when a metric has not improved for `patience` evaluations in a row.

    After it has stopped a run, its count begins again: a run that is continued (`fit(continue_stopped=True)`) has
    `patience` further evaluations to improve on the best value; of another metric than before, on its first value.

    Args:
        monitor: a metric of the evaluation, `"val_loss"` (default), `"top1"`, …; or `"loss"`, the mean training
            loss of an epoch, which needs no validation data.
        patience: evaluations without an improvement before it stops. Positive integer. Default 3.
        min_delta: smallest change that counts as an improvement, 0 or more. Default 0.
        mode: `"min"`: lower is better; `"max"`: higher is better; `"auto"` (default): as the metric's
            torchmetrics class or the task declares it (`higher_is_better`); for losses, lower is better.

    Attributes:
        lower_is_better: the direction, for `mode="auto"` once `check` was called.
        best: the best value so far; None before the first evaluation.
        waited: evaluations since.

    Raises:
        PlanError: for an invalid value; from `fit`, for an unknown metric, or for `"auto"` and a metric whose
            direction nobody declares.

    Example::

        >>> stopping = EarlyStopping("val_loss", patience=5)
        >>> result = pipeline.fit(epochs=2, callbacks=[stopping], progress=False)
    """

    def __init__(
        self, monitor: str = "val_loss", patience: int = 3, min_delta: float = 0.0, mode: Mode = "auto"
    ) -> None:
        if not isinstance(monitor, str):
            raise PlanError(f"EarlyStopping: monitor={monitor!r:.60} must be the name of a metric.")
        check_whole("EarlyStopping: patience", patience, PlanError, 1)
        check_number("EarlyStopping: min_delta", min_delta, PlanError, "[0, inf)")
        if mode not in get_args(Mode):
            raise PlanError(f"EarlyStopping: mode={mode!r} is not known.{suggest(str(mode), get_args(Mode))}")
        self.monitor, self.patience, self.min_delta, self.mode = monitor, patience, min_delta, mode
        self.lower_is_better = mode != "max"
        self.best: float | None = None
        self.waited = 0

    def check(self, run: RunOptions) -> None:
        check_monitor("EarlyStopping", self.monitor, run)
        if self.mode != "auto":
            return
        higher = direction(self.monitor, run)
        if higher is None:
            raise PlanError(
                f"EarlyStopping: the metric {self.monitor!r} does not declare whether higher is better. Pass "
                "mode='min' or mode='max'."
            )
        self.lower_is_better = not higher

    def on_fit_start(self, view: RunView) -> None:  # noqa: ARG002
        self.best, self.waited = None, 0

    def on_evaluation_end(self, view: RunView) -> None:
        if self.monitor != LOSS:
            self._look(view, view.metrics.get(self.monitor))

    def on_epoch_end(self, view: RunView) -> None:
        if self.monitor == LOSS:
            self._look(view, view.history[-1].loss)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, **self._judges_by()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also those of earlier versions, without what they judged by. The best value of another metric is none."""
        if all(state.get(name, value) == value for name, value in self._judges_by().items()):
            self.best, self.waited = state["best"], state["waited"]

    def _judges_by(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "lower_is_better": self.lower_is_better}

    def _look(self, view: RunView, value: float | None) -> None:
        """Compare the value; one that is undefined, such as a mean over no sample, is no improvement."""
        sign = 1.0 if self.lower_is_better else -1.0
        if value is not None and (self.best is None or sign * (self.best - value) > self.min_delta):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.waited = 0
            than = "" if self.best is None else f" on {self.best:.6g}"
            view.stop(
                f"EarlyStopping: {self.monitor} has not improved{than} for {self.patience} "
                f"evaluation{'s' * (self.patience != 1)}"
            )
