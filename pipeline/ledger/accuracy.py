"""What the stages do to accuracy: each variant trained for the same number of epochs from the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tqdm.auto import tqdm

from ...checks import is_number
from ...errors import PlanError
from ..runs.fit import fit
from ..spec.resolve import ResolvedPlan
from ..telemetry.history import Epoch
from .crew import described
from .variants import Variant


def check_accuracy(plan: ResolvedPlan, target: float | None) -> int:
    """The number of epochs to train each variant for.

    Raises:
        PlanError: without it, without validation data, or for a target that is no share.
    """
    epochs = plan.spec.epochs
    if epochs is None:
        raise PlanError(
            "The pipeline does not say how long to train; give ledger(accuracy=True, epochs=…) (--epochs)."
        )
    if plan.data.val is None:
        raise PlanError("accuracy=True needs validation data: give load() a second file (--val).")
    if target is not None and not is_number(target, "(0, 1]"):
        raise PlanError(f"target={target!r} is a top-1 accuracy; it must be a number above 0, at most 1.")
    return epochs


def train_each(variants: Sequence[Variant], found: dict[str, Any], progress: bool) -> None:
    """Train each variant once, and add its row as soon as it is known.

    Args:
        variants: plain PyTorch first.
        found: `{"epochs", "target", "rows"}`: the epochs of each; the top-1 accuracy, 0 to 1, or None, which becomes
            what plain PyTorch reaches in the end; and the rows, which are added by name as `{"accuracy", "seconds",
            "seconds_to_target"}`. Seconds are of whole epochs, evaluation, starting of workers and compiling
            included; None where the target was not reached. A training that fails has `{"failed": reason}` in
            addition, and None for the others.
        progress: show a bar.
    """
    with tqdm(total=len(variants), unit="training", disable=not progress, leave=False) as bar:
        for number, variant in enumerate(variants, 1):
            bar.set_description(f"ledger: accuracy, training {number}/{len(variants)}: {variant.name}")
            found["rows"][variant.name] = _row(variant, found)
            bar.update()


def _row(variant: Variant, found: dict[str, Any]) -> dict[str, Any]:
    try:
        epochs = fit(variant.spec, epochs=found["epochs"], out=None, progress=False).history.epochs
    except Exception as error:  # it diverged, or lacked memory: the others are trained all the same
        return {"accuracy": None, "seconds": None, "seconds_to_target": None, "failed": described(error)}
    if found["target"] is None and not found["rows"]:
        found["target"] = epochs[-1].accuracy
    target = found["target"]
    return {
        "accuracy": epochs[-1].accuracy,
        "seconds": sum(epoch.seconds for epoch in epochs),
        "seconds_to_target": None if target is None else seconds_to(target, epochs),
    }


def seconds_to(target: float, history: Sequence[Epoch]) -> float | None:
    """Seconds until the end of the first epoch with at least that accuracy; None if there is none."""
    spent = accumulate(epoch.seconds for epoch in history)
    pairs = zip(history, spent, strict=True)
    return next((at for epoch, at in pairs if epoch.accuracy is not None and epoch.accuracy >= target), None)
