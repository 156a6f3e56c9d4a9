"""Classification: one class per image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ...common.errors import PlanError
from .means import LossFunction
from .metrics import maker, top
from .task import Kind, StandardTask, Targets, check_names, names_of

if TYPE_CHECKING:
    from torchmetrics import Metric


class Classification(StandardTask):
    """One class per image: the model returns logits `(B, C)`, targets are class indices `(B,)`.

    With MixUp or CutMix, the loss receives probabilities `(B, C)` instead.

    Args:
        metrics: of `"top1"`, `"top5"` (any `"topK"`), `"f1"`, `"precision"`, `"recall"` (means over the classes) and
            `"auroc"`, or torchmetrics objects. Default `("top1", "top5")`, as ImageNet's results are reported;
            without `"top5"` for up to five classes.
        loss: default cross entropy; `"model"`: the one that the model computes.
        monitor: default the first metric.

    Example::

        >>> pipeline = pipeline.task(Classification(metrics=("top1", "f1"), monitor="f1"))
    """

    kind: ClassVar[Kind] = "class indices"
    LOSSES: ClassVar[Mapping[str, LossFunction]] = {"cross_entropy": F.cross_entropy}
    METRICS: ClassVar[Mapping[str, Callable[[int], Any]]] = {
        "top1": top(1),
        "top5": top(5),
        "f1": maker("MulticlassF1Score"),
        "precision": maker("MulticlassPrecision"),
        "recall": maker("MulticlassRecall"),
        "auroc": maker("MulticlassAUROC"),
    }
    DEFAULT_METRICS = ("top1", "top5")

    def meters(self, width: int | None) -> dict[str, Metric]:
        meters = super().meters(width)
        if "metrics" not in self.options and width is not None and width <= 5:
            del meters["top5"]
        return meters

    def predict(self, outputs: Any) -> torch.Tensor:
        """Return probabilities `(B, C)`."""
        return torch.softmax(outputs, dim=1)

    def row(self, prediction: Any, classes: Sequence[str]) -> dict[str, Any]:
        """Return `class`, `probability` and, from the most probable on, all `probabilities` by name."""
        names = names_of(len(prediction), classes)
        order = prediction.argsort(descending=True).tolist()
        probabilities = {names[i]: prediction[i].item() for i in order}
        return {
            "class": names[order[0]],
            "probability": probabilities[names[order[0]]],
            "probabilities": probabilities,
        }

    def check(self, train: Targets, val: Targets | None) -> int:
        """Return the number of classes: that of the class names if a source has any, else the largest training label
        plus one.

        Validation data without names may lack the last classes.

        Raises:
            PlanError: if labels are not class indices, or the two sources index their classes differently.
        """
        for targets in (train, val):
            if targets is not None:
                _check_indices(targets)
        classes = len(train.classes) or int(train.values.max()) + 1
        if val is None:
            return classes
        check_names(train, val, "classes")
        classes = classes if train.classes else max(len(val.classes), classes)
        if val.values.max() >= classes or train.values.max() >= classes:
            raise PlanError(
                f"{train.source} has {classes} classes, but {val.source} has the label {int(val.values.max())}, which "
                f"a model of {classes} classes cannot predict. Convert both from data of the same classes."
            )
        return classes

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:
        return logits_error(outputs, width, source, "classes")


def logits_error(outputs: Any, width: int | None, source: str, what: str) -> str:
    """Return why outputs for two images are not `width` logits each, with the remedy; "" if they are."""
    if not isinstance(outputs, torch.Tensor):
        return (
            f"The model returns a {type(outputs).__name__}, but a loss needs one tensor of logits. Wrap it in a module "
            f"whose forward returns only the logits, {width} for each image."
        )
    if outputs.shape != (2, width):
        return (
            f"The model returns {tuple(outputs.shape)} for 2 images, but {source} has {width} {what}. Build it with "
            f"num_classes={width}, so that it returns (2, {width}); in a recipe: model_options.num_classes={width}."
        )
    return ""


def _check_indices(targets: Targets) -> None:
    values = targets.values
    if not np.issubdtype(values.dtype, np.integer) or values.ndim != 1:
        what = "float labels" if values.ndim == 1 else f"vectors of {values.shape[1]} numbers as labels"
        raise PlanError(
            f"{targets.source} has {what}, but Classification trains with cross entropy, which needs class indices. "
            "Convert it with integer labels, or choose .task(Regression()) or .task(MultiLabel())."
        )
    if values.min() < 0:
        raise PlanError(
            f"{targets.source} has the label {values.min()}, but class indices start at 0. Convert it again."
        )
