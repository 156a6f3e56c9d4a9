"""Smith's learning-rate range test: train a few steps at growing learning rates, and look where the loss falls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....common.checks import check_whole, is_number
from ....common.errors import PlanError, require
from ....common.pictures import BLUE, INK, PALE, RED, check_picture, displayed, drawn, image_tag, save_picture
from ...describe.pipeline_spec import PipelineSpec
from ...describe.resolve import ResolvedPlan, resolve
from ...runs.initial import initial_weights
from ...runs.ranks import built_here, on_ranks
from ...telemetry.observer import Observer
from ...telemetry.state import TrainState
from ...training.build import Built, plain_torch, resolve_data
from ...training.loop import train_epoch
from ...training.schedule import Schedule

SMOOTHING = 0.9
"""Weight of the earlier losses in the smoothed one: it forgets half within seven steps."""
DIVERGED = 4.0
"""The test ends where the smoothed loss is so many times its lowest."""
WINDOW = 8  # the slope at a learning rate is the mean of an eighth of all steps around it
FEWEST = 10  # steps of which a slope is known
LINE, MARK = BLUE, RED


@dataclass(frozen=True, eq=False)
class LRRange:
    """The result of a learning-rate range test.

    Attributes:
        lrs: the learning rate of each step, of the first parameter group, ascending.
        losses: the training loss of each step, over all ranks.
        smoothed: its exponential moving average, corrected for the beginning.
        diverged: whether the test ended early, because the loss was not finite or many times its lowest.

    Example::

        >>> found = pipeline.lr_range(steps=12)
        >>> len(found.lrs) <= 12, found.lrs[0]
        (True, 1e-06)
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool

    @property
    def suggestion(self) -> float | None:
        """The learning rate at which the smoothed loss falls fastest, over the logarithm of the learning rate; None if
        it does not fall. It is where to begin a search, not the best value."""
        at = self._steepest()
        return None if at is None else self.lrs[at]

    def _steepest(self) -> int | None:
        """Look after the first tenth, in which the average knows few losses, and up to the minimum."""
        first, lowest = len(self.lrs) // 10, int(np.argmin(self.smoothed))
        if lowest - first < 2:
            return None
        slopes = np.gradient(np.array(self.smoothed), np.log(self.lrs))
        window = len(slopes) // WINDOW | 1
        padded = np.pad(slopes, window // 2, mode="edge")
        slopes = np.convolve(padded, np.full(window, 1 / window), mode="valid")[first : lowest + 1]
        return first + int(np.argmin(slopes)) if slopes.min() < 0 else None

    def show(self) -> Any:
        """Return the curve, which a notebook displays: a matplotlib figure.

        Raises:
            MissingExtra: without matplotlib.
        """
        figure = require("matplotlib.figure", "plot", "draw a learning-rate range test").Figure(
            figsize=(7, 4), layout="constrained"
        )
        axes = figure.subplots()
        axes.plot(self.lrs, self.losses, color=PALE, linewidth=1, label="loss of a step")
        axes.plot(self.lrs, self.smoothed, color=LINE, linewidth=2, label="smoothed")
        at = self._steepest()
        if at is not None:
            axes.plot(self.lrs[at], self.smoothed[at], "o", color=MARK, label=f"falls fastest: {self.lrs[at]:.2g}")
        low, high = min(self.losses), max(self.smoothed[: int(np.argmin(self.smoothed)) + 1])
        axes.set_ylim(low - 0.1 * (high - low), high + 0.5 * (high - low) or None)  # else what diverges hides the rest
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_title("training loss", loc="left", fontsize=10, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        return displayed(figure)

    def save(self, path: str | Path) -> Path:
        """Write the curve.

        Raises:
            DataError: unless `path` ends in `.png`, `.svg` or `.pdf`.
            MissingExtra: without matplotlib.
        """
        path = check_picture(path)
        return save_picture(self.show(), path)

    def __repr__(self) -> str:
        end = f"{'diverged' if self.diverged else 'ended'} at {self.lrs[-1]:.2g}"
        if self.suggestion is None:
            return f"LRRange({len(self.lrs)} steps, {end}; the loss does not fall)"
        return f"LRRange({len(self.lrs)} steps, {end}; the loss falls fastest at {self.suggestion:.2g})"

    def _repr_html_(self) -> str:
        return image_tag(drawn(self.show(), dpi=110), repr(self))


@plain_torch()
def lr_range(spec: PipelineSpec, lowest: float, highest: float, steps: int) -> LRRange:
    """See `Pipeline.lr_range`."""
    check_whole("steps", steps, PlanError, FEWEST)
    for name, value in (("lowest", lowest), ("highest", highest)):
        if not is_number(value, "(0, inf)"):
            raise PlanError(f"lr_range({name}={value!r}) must be a finite number above 0.")
    if lowest >= highest:
        raise PlanError(f"lr_range(lowest={lowest:g}) must be below highest={highest:g}.")
    # Without a number of epochs, none can be too few for a transform.
    return on_ranks(resolve_data(resolve(spec), progress=False), _test_rank, lowest, highest, steps)


def _test_rank(plan: ResolvedPlan, lowest: float, highest: float, steps: int) -> LRRange:
    with built_here(plan, initial_weights(plan)) as built:
        schedule = _Growing(plan, built, lowest, highest, steps)
        watch = _Watch(built, steps)
        length = (plan.spec.epochs or 1) * len(built.train)
        built.hooks.begin(built.engine, max(length, steps), built.train)
        while built.hooks.state.stop is None:
            built.begin_epoch()
            train_epoch(built.engine, built.train, built.loss, built.hooks, schedule, watch)
        if len(watch.losses) < FEWEST:
            raise PlanError(
                f"The loss diverges after {len(watch.losses)} steps, at the learning rate {watch.lrs[-1]:.2g}. Pass "
                f"a smaller lr_range(lowest=…) than {lowest:g}."
            )
        return LRRange(tuple(watch.lrs), tuple(watch.losses), tuple(watch.smoothed), watch.diverged)


class _Growing(Schedule):
    """From `lowest` to `highest` by equal factors; parameter groups keep their ratio to the first one."""

    def __init__(self, plan: ResolvedPlan, built: Built, lowest: float, highest: float, steps: int) -> None:
        optimizer = built.engine.optimizer
        super().__init__(plan.optimization, optimizer, steps)
        first = float(self._peaks[0])
        self._shares = [float(peak) / first if first else 1.0 for peak in self._peaks]
        self._hooks = built.hooks
        self._lowest, self._factor = lowest, (highest / lowest) ** (1 / (steps - 1))

    def set_lr(self, step: float) -> float:  # noqa: ARG002
        rate: float = self._lowest * self._factor**self._hooks.state.step  # whatever the length of an epoch
        for group, share in zip(self._optimizer.param_groups, self._shares, strict=True):
            group["lr"] = rate * share
            if "peak_lr" in group:  # SGDW's: each rate is tried as a peak
                group["peak_lr"] = group["lr"]
        return rate


class _Watch(Observer):
    """Note each step's loss, the same on all ranks, and end the test."""

    def __init__(self, built: Built, steps: int) -> None:
        self._engine, self._steps = built.engine, steps
        self.lrs: list[float] = []
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self.diverged = False
        self._average = 0.0

    def on_step_end(self, state: TrainState) -> None:
        loss = self._engine.reduce(state.step_loss).item()
        self.diverged = not math.isfinite(loss)
        if not self.diverged:
            self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
            smoothed = self._average / (1 - SMOOTHING ** (len(self.losses) + 1))
            self.lrs.append(state.lr)
            self.losses.append(loss)
            self.smoothed.append(smoothed)
            lowest = min(self.smoothed)
            self.diverged = len(self.losses) > FEWEST and lowest > 0 and smoothed > DIVERGED * lowest
        elif not self.lrs:
            self.lrs.append(state.lr)
        if self.diverged or len(self.losses) == self._steps:
            state.stop = "the range test ended"
