"""The callback of a race: it keeps every evaluation with its seconds of training, and ends a hopeless run."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from ...callbacks.callback import Callback, RunView
from ...telemetry.history import Monitor


class RaceClock(Callback):
    """Keep `(seconds, images, accuracy)` of each evaluation. Once the training has taken more than `limit` seconds
    without reaching the target, it ends at the next evaluation or end of an epoch. There is no `on_step_end`, which
    could slow the steps that are timed."""

    def __init__(self, monitor: Monitor, target: float, limit: float | None) -> None:
        self.monitor, self.target, self.limit = monitor, target, limit
        self.points: list[list[float]] = []
        self._start, self._before = perf_counter(), 0.0

    @property
    def wall(self) -> float:
        """Seconds since it was created, and those of the run before it was interrupted."""
        return self._before + perf_counter() - self._start

    @property
    def reason(self) -> str:
        """Why it stops a run."""
        return f"race: {self.target:g} not reached within {self.limit:.4g} s" if self.limit is not None else ""

    def on_fit_start(self, view: RunView) -> None:  # noqa: ARG002
        self.points = []

    def on_evaluation_end(self, view: RunView) -> None:
        value = view.metrics.get(self.monitor.name)
        if value is not None and value == value:  # not over no sample
            self.points.append([view.seconds, view.images, self.monitor.fraction(value)])
        self._look(view)

    def on_epoch_end(self, view: RunView) -> None:
        self._look(view)

    def _look(self, view: RunView) -> None:
        reached = any(self.monitor.reaches(accuracy, self.target) for _, _, accuracy in self.points)
        if self.limit is not None and view.seconds > self.limit and not reached:
            view.stop(self.reason)

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points, "wall": self.wall}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.points, self._before, self._start = state["points"], state["wall"], perf_counter()
