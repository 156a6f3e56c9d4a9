"""Segmentation: one class per pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from ...common.checks import is_whole
from ...common.errors import PlanError
from .means import CLASS_LOSSES, LossFunction
from .metrics import maker
from .task import Kind, StandardTask, Targets, check_names, shape_of

if TYPE_CHECKING:
    from torchmetrics import Metric

IGNORED = 255
"""The class index of pixels that do not count, as in PASCAL VOC and Cityscapes."""


def cross_entropy(
    outputs: torch.Tensor, targets: torch.Tensor, reduction: Literal["mean", "sum"] = "mean"
) -> torch.Tensor:
    """Return the mean over the pixels that count, 0 if none does, or their sum; of int64 targets."""
    total = F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="sum")
    return total if reduction == "sum" else total / (targets != IGNORED).sum().clamp(min=1)


CLASS_LOSSES.append((cross_entropy, IGNORED))


class Segmentation(StandardTask):
    """One class per pixel: the model returns logits `(B, C, H, W)`, targets are masks `(B, H, W)` of class indices.

    The index 255 marks pixels that do not count. Of a model's dict, `out` is used, as torchvision's have it.

    Args:
        classes: number of classes C.
        metrics: of `"miou"` (mean intersection over union over the classes, of all pixels of the data) and
            `"pixel_accuracy"`, or torchmetrics objects. Default `("miou", "pixel_accuracy")`.
        loss: default cross entropy over the pixels that count; `"model"`: the one that the model computes.
        monitor: default the first metric.

    Example::

        >>> pipeline = pipeline.task(Segmentation(classes=21))
    """

    kind: ClassVar[Kind] = "masks"
    LOSSES: ClassVar[Mapping[str, LossFunction]] = {"cross_entropy": cross_entropy}
    METRICS: ClassVar[Mapping[str, Callable[[int], Any]]] = {
        "miou": maker("MulticlassJaccardIndex", ignore_index=IGNORED),
        "pixel_accuracy": maker("MulticlassAccuracy", average="micro", ignore_index=IGNORED),
    }
    DEFAULT_METRICS = ("miou", "pixel_accuracy")

    def __init__(
        self, classes: int, *, metrics: Any = None, loss: Any = None, monitor: str | None = None
    ) -> None:
        if not is_whole(classes, 2):
            raise PlanError(f"Segmentation: classes={classes!r} must be an integer of at least 2.")
        super().__init__(metrics=metrics, loss=loss, monitor=monitor)
        vars(self).update(classes=classes, _given={"classes": classes, **self._given})

    classes: int

    def meters(self, width: int | None) -> dict[str, Metric]:  # noqa: ARG002
        return super().meters(self.classes)

    def predict(self, outputs: Any) -> torch.Tensor:
        """Return the class of each pixel, `(B, H, W)`."""
        prediction: torch.Tensor = outputs.argmax(1)
        return prediction

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the masks as torchmetrics takes them: int64."""
        return targets.long()

    def loss_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the masks as losses take them: int64."""
        return targets.long()

    def model_inputs(self, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the masks as int64 `labels` for a model that computes the loss."""
        return {name: value.long() for name, value in super().model_inputs(targets).items()}

    def check(self, train: Targets, val: Targets | None) -> int:
        """Return the number of classes.

        Raises:
            PlanError: if the targets are not masks, or have more classes than this task.
        """
        for targets in (train, val):
            if targets is None:
                continue
            if targets.largest is None:
                raise PlanError(
                    f"{targets.source} has one label per image, but Segmentation needs a mask per image. Convert it "
                    "from pairs of an image and a mask, or with labels=FOLDER_OF_MASKS."
                )
            found = max(targets.largest + 1, len(targets.classes))
            if found > self.classes:
                raise PlanError(
                    f"{targets.source} has {found} classes, but the task has classes={self.classes}. Pass "
                    f"Segmentation({found}); {IGNORED} is for pixels that do not count."
                )
        check_names(train, val, "classes")
        return self.classes

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:  # noqa: ARG002
        logits = isinstance(outputs, torch.Tensor) and outputs.dim() == 4
        if logits and outputs.shape[:2] == (2, self.classes):
            return ""
        found = shape_of(outputs)
        return (
            f"The model returns {found} for 2 images, but {self} needs logits per pixel, (2, {self.classes}, H, W). "
            f"Build it with num_classes={self.classes}; in a recipe: model_options.num_classes={self.classes}."
        )
