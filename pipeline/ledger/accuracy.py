"""Measure how the stages affect accuracy: train each variant for the same number of epochs from the same seed."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm.auto import tqdm

from ...common.checks import is_number
from ...common.errors import PlanError
from ...common.terminal import is_interactive
from ..describe.resolve import ResolvedPlan
from ..measuring.runner import Variant, describe_error
from ..measuring.variant import VariantId
from ..runs.config import FitConfig
from ..runs.fit import fit
from ..tasks.scales import check_comparable
from ..telemetry.history import Epoch, Monitor
from .data import Trained


def check_accuracy(plan: ResolvedPlan, target: float | None) -> int:
    """Return the number of epochs to train each variant.

    Raises:
        PlanError: if it is not set, without validation data, or for an invalid target.
    """
    epochs = plan.spec.epochs
    if epochs is None:
        raise PlanError("Number of epochs not set. Pass ledger(accuracy=True, epochs=…) (--epochs).")
    if plan.data.val is None:
        raise PlanError("accuracy=True needs validation data. Pass a second file to load() (--val).")
    check_comparable(plan.task, "accuracy=True")
    if target is not None and not is_number(target, "(0, 1]"):
        raise PlanError(f"target={target!r} is an accuracy and must be a number in (0, 1].")
    return epochs


def train_each(
    variants: Sequence[Variant],
    rows: dict[VariantId, Trained],
    epochs: int,
    target: float | None,
    progress: bool,
) -> None:
    """Train each variant once, and add its row to `rows` as soon as it ends.

    Args:
        variants: plain PyTorch first.
        rows: the results so far, extended in place.
        epochs: epochs of each training run.
        target: see `Accuracies`; None for the final accuracy of the first variant.
        progress: show a progress bar.
    """
    with tqdm(
        total=len(variants), unit="training", disable=not (progress and is_interactive()), leave=False
    ) as bar:
        for number, variant in enumerate(variants, 1):
            bar.set_description(f"ledger: accuracy, training {number}/{len(variants)}: {variant.id}")
            rows[variant.id] = row = _trained(variant, epochs, target, sets_target=number == 1)
            if number == 1 and target is None:
                target = row.accuracy
            bar.update()


def _trained(variant: Variant, epochs: int, target: float | None, sets_target: bool) -> Trained:
    try:
        run = fit(variant.spec, FitConfig(epochs=epochs, progress=False, checkpoints=None)).history
    except Exception as error:  # e.g. out of memory: continue with the others
        return Trained(failed=describe_error(error))
    accuracy = None if run.monitored is None else run.monitor.fraction(run.monitored)
    if target is None and sets_target:
        target = accuracy
    return Trained(
        accuracy,
        sum(epoch.seconds for epoch in run.epochs),
        None if target is None else seconds_to(target, run.epochs, run.monitor),
    )


def seconds_to(target: float, history: Sequence[Epoch], monitor: Monitor) -> float | None:
    """Return the seconds until the end of the first epoch whose metric reaches `target`; None if none does."""
    spent = 0.0
    for epoch in history:
        spent += epoch.seconds
        value = monitor.of(epoch)
        if value is not None and monitor.reaches(monitor.fraction(value), target):
            return spent
    return None
