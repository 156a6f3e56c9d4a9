"""Translate callbacks to Lightning's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from ...common.errors import PlanError
from ..callbacks.callback import Callback, RunOptions
from ..callbacks.early_stopping import EarlyStopping

REMEDIES = {
    "GradientNorms": "log them in on_before_optimizer_step of a callback of Lightning's",
    "Profile": "pass Lightning's profiler to the Trainer: to_lightning(profiler='pytorch')",
}
"""What to use instead, by class, where Lightning has no such callback."""


def translated(callbacks: Any, run: RunOptions) -> Any:
    """Return the Trainer's `callbacks` (one, a list or None), with those of Drivetrain that Lightning has, too, as
    Lightning's."""
    if not isinstance(callbacks, list | tuple):
        return translated([callbacks], run)[0]
    return [_translated(one, run) if isinstance(one, Callback) else one for one in callbacks]


def _translated(one: Callback, run: RunOptions) -> pl.Callback:
    name = type(one).__name__
    if type(one) is not EarlyStopping:
        remedy = REMEDIES.get(name, "write it as a callback of Lightning's")
        raise PlanError(
            f"to_lightning(callbacks=…): {name} is a callback of Drivetrain, which only runs in fit(). Leave it out, "
            f"and {remedy}."
        )
    one.check(run)
    # An undefined metric is not logged, and is no improvement, as in fit(); Lightning would stop at once.
    return pl.callbacks.EarlyStopping(
        one.monitor, min_delta=one.min_delta, patience=one.patience, mode="min" if one.lower_is_better else "max",
        strict=False, check_finite=False, check_on_train_epoch_end=one.monitor == "loss",
    )  # fmt: skip
