"""What the stages do to accuracy: each variant trained for the same number of epochs from the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tqdm.auto import tqdm

from ..checks import is_number
from ..errors import PlanError
from .builder import Pipeline
from .fit import fit
from .ledger_variants import Variant
from .result import Epoch
from .rules import check_epochs


def check_accuracy(pipeline: Pipeline, epochs: int | None, target: float | None) -> int:
    """The number of epochs to train each variant for.

    Raises:
        PlanError: without it, without validation data, or for a target that is no share.
    """
    epochs = pipeline.epochs if epochs is None else epochs
    if epochs is None:
        raise PlanError(
            "The pipeline does not say how long to train; give ledger(accuracy=True, epochs=…) (--epochs)."
        )
    check_epochs(pipeline, epochs)
    if pipeline.data is None or pipeline.data.val is None:
        raise PlanError("accuracy=True needs validation data: give load() a second file (--val).")
    if target is not None and not is_number(target, "(0, 1]"):
        raise PlanError(f"target={target!r} is a top-1 accuracy; it must be a number above 0, at most 1.")
    return epochs


def train_each(
    variants: Sequence[Variant], epochs: int, target: float | None, progress: bool
) -> dict[str, Any]:
    """Trains each variant once; the rows by name.

    Args:
        variants: plain PyTorch first.
        epochs: of each.
        target: top-1 accuracy, 0 to 1; None: what plain PyTorch reaches in the end.
        progress: show a bar.

    Returns:
        `{"epochs", "target", "rows": {name: {"accuracy", "seconds", "seconds_to_target"}}}`. Seconds are of
        whole epochs, evaluation, starting of workers and compiling included; None where the target was
        not reached.
    """
    histories = {}
    with tqdm(variants, desc="ledger: accuracy", disable=not progress, leave=False) as bar:
        for variant in bar:
            bar.set_description(f"ledger: accuracy of {variant.name}")
            result = fit(variant.pipeline, epochs=epochs, out=None, progress=False)
            histories[variant.name] = result.history.epochs
    if target is None:
        target = histories[variants[0].name][-1].accuracy
        assert target is not None  # there is validation data
    rows = {
        name: {
            "accuracy": history[-1].accuracy,
            "seconds": sum(epoch.seconds for epoch in history),
            "seconds_to_target": seconds_to(target, history),
        }
        for name, history in histories.items()
    }
    return {"epochs": epochs, "target": target, "rows": rows}


def seconds_to(target: float, history: Sequence[Epoch]) -> float | None:
    """Seconds until the end of the first epoch with at least that accuracy; None if there is none."""
    spent = accumulate(epoch.seconds for epoch in history)
    pairs = zip(history, spent, strict=True)
    return next((at for epoch, at in pairs if epoch.accuracy is not None and epoch.accuracy >= target), None)
