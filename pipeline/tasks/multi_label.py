"""MultiLabel: any number of labels per image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ...common.errors import PlanError
from .classification import logits_error
from .means import LossFunction
from .metrics import maker
from .task import Kind, StandardTask, Targets, check_names, names_of, vectors


class MultiLabel(StandardTask):
    """Any number of labels per image: the model returns logits `(B, K)`, targets are vectors `(B, K)` of 0 and 1.

    MixUp and CutMix mix the vectors. A label without a positive sample in the validation data counts as 0 in `map` and
    `f1`; torchmetrics warns of it.

    Args:
        metrics: of `"map"` (mean average precision over the labels), `"f1"` (mean over the labels, at probability
            0.5), `"precision"`, `"recall"` and `"auroc"`, or torchmetrics objects. Default `("map", "f1")`, as results
            on COCO and VOC are reported.
        loss: default binary cross entropy with logits, the mean over images and labels; `"model"`: the one that the
            model computes.
        monitor: default the first metric.

    Example::

        >>> pipeline = pipeline.task(MultiLabel(metrics=("map", "f1")))
    """

    kind: ClassVar[Kind] = "labels"
    LOSSES: ClassVar[Mapping[str, LossFunction]] = {"bce": F.binary_cross_entropy_with_logits}
    METRICS: ClassVar[Mapping[str, Callable[[int], Any]]] = {
        "map": maker("MultilabelAveragePrecision"),
        "f1": maker("MultilabelF1Score"),
        "precision": maker("MultilabelPrecision"),
        "recall": maker("MultilabelRecall"),
        "auroc": maker("MultilabelAUROC"),
    }
    DEFAULT_METRICS = ("map", "f1")

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the targets as torchmetrics takes them: integers."""
        return targets.long()

    def predict(self, outputs: Any) -> torch.Tensor:
        """Return the probability of each label, `(B, K)`."""
        return torch.sigmoid(outputs)

    def row(self, prediction: Any, classes: Sequence[str]) -> dict[str, Any]:
        """Return the `labels` with a probability of at least 0.5, and all `probabilities` by name."""
        probabilities = dict(zip(names_of(len(prediction), classes), prediction.tolist(), strict=True))
        return {
            "labels": [name for name, p in probabilities.items() if p >= 0.5],
            "probabilities": probabilities,
        }

    def check(self, train: Targets, val: Targets | None) -> int:
        """Return the number of labels.

        Raises:
            PlanError: if targets are not vectors of 0 and 1, or the two sources differ.
        """
        width = vectors(self, train, val, "a vector of 0 and 1 per image")
        check_names(train, val, "labels")
        for targets in (train, val):
            if targets is None:
                continue
            if targets.values.ndim != 2:
                raise PlanError(
                    f"{targets.source} has one number per image, but MultiLabel needs a vector of 0 and 1. Convert it "
                    "with vectors, or choose .task(Classification())."
                )
            wrong = (targets.values != 0) & (targets.values != 1)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise PlanError(
                    f"{targets.source} has the value {targets.values[at]} in the vector of sample {at[0]}, but "
                    "MultiLabel needs 0 or 1. Convert it again, or choose .task(Regression())."
                )
        return width

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:
        return logits_error(outputs, width, source, "labels")
