"""Segmentation: one class per pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from ...checks import is_whole
from ...errors import PlanError
from .metrics import maker
from .task import Kind, LossFunction, StandardTask, Targets

if TYPE_CHECKING:
    from torchmetrics import Metric

IGNORED = 255
"""The class index of pixels that do not count, as in PASCAL VOC and Cityscapes."""


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over the pixels that count; 0 if none does."""
    total = F.cross_entropy(outputs, targets.long(), ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


class Segmentation(StandardTask):
    """One class per pixel: the model returns logits `(B, C, H, W)`, targets are masks `(B, H, W)` of class indices.

    The index 255 marks pixels that do not count. Of a model's dict, `out` is used, as torchvision's have it.

    Args:
        classes: number of classes C.
        metrics: of `"miou"` (mean intersection over union over the classes, of all pixels of the data) and
            `"pixel_accuracy"`, or torchmetrics objects. Default `("miou", "pixel_accuracy")`.
        loss: default cross entropy over the pixels that count.
        monitor: default the first metric.
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
        """Return new torchmetrics objects by name."""
        return super().meters(self.classes)

    def predict(self, outputs: Any) -> torch.Tensor:
        """Return the class of each pixel, `(B, H, W)`."""
        prediction: torch.Tensor = outputs.argmax(1)
        return prediction

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the masks as torchmetrics takes them: int64."""
        return targets.long()

    def check(self, train: Targets, val: Targets | None) -> int:  # noqa: ARG002
        """Raise PlanError: `.beton` files have no masks yet."""
        raise PlanError(
            f"{train.source} has one label per image, but Segmentation needs a mask per image, which .beton files "
            "cannot hold yet. Train on tensors with drivetrain.pipeline.train_epoch and Segmentation().loss."
        )
