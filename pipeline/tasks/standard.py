"""The standard tasks on labels: classification, several labels, numbers, and classes of pixels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from ...common.checks import is_whole
from ...common.errors import PlanError
from .means import CLASS_LOSSES, LossFunction, ignored_by
from .metrics import maker, mean_auroc, r2, top
from .target_scale import TargetScale, fit_scale
from .task import Kind, StandardTask, Targets, check_names, names_of, shape_of, vectors

if TYPE_CHECKING:
    from torchmetrics import Metric


class Classification(StandardTask):
    """One class per image: the model returns logits `(B, C)`, targets are class indices `(B,)`.

    With MixUp or CutMix, the loss receives probabilities `(B, C)` instead. A class without samples in the validation
    data, for which it is undefined, does not count in `auroc`.

    Args:
        metrics: of `"top1"`, `"top5"` (any `"topK"`), `"f1"`, `"precision"`, `"recall"` (means over the classes) and
            `"auroc"`, or torchmetrics objects. Default `("top1", "top5")`, as ImageNet's results are reported;
            without `"top5"` for up to five classes, unless it is the monitor.
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
        "auroc": mean_auroc("MulticlassAUROC"),
    }
    DEFAULT_METRICS = ("top1", "top5")

    def meters(self, width: int | None) -> dict[str, Metric]:
        meters = super().meters(width)
        chosen = "metrics" in self.options or self.monitor == "top5"
        if not chosen and width is not None and width <= 5:
            meters.pop("top5", None)  # of a subclass, the default may lack it
        return meters

    def predict(self, outputs: Any) -> torch.Tensor:
        """Return probabilities `(B, C)`."""
        return torch.softmax(outputs, dim=1)

    probabilities = predict

    def row(self, prediction: Any, classes: Sequence[str]) -> dict[str, Any]:
        """Return `class`, `probability` and, from the most probable on, all `probabilities` by name."""
        names = names_of(len(prediction), classes)
        order = prediction.argsort(descending=True).tolist()
        probabilities = {names[i]: prediction[i].item() for i in order}
        best = names[order[0]]
        return {"class": best, "probability": probabilities[best], "probabilities": probabilities}

    def check(self, train: Targets, val: Targets | None) -> int:
        """Return the number of classes: that of the class names if a source has any, else the largest training label
        plus one. Validation data without names may lack the last classes."""
        for targets in filter(None, (train, val)):
            _check_indices(targets)
        classes = len(train.classes) or train.range[1] + 1
        if val is None:
            return classes
        check_names(train, val, "classes")
        classes = classes if train.classes else max(len(val.classes), classes)
        if max(val.range[1], train.range[1]) >= classes:
            raise PlanError(
                f"{train.source} has {classes} classes, but {val.source} has the label {val.range[1]}, which "
                f"a model of {classes} classes cannot predict. Convert both from data of the same classes."
            )
        return classes

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:
        return logits_error(outputs, width, source, "classes")


def logits_error(outputs: Any, width: int | None, source: str, what: str) -> str:
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
    some = targets.some
    if not np.issubdtype(some.dtype, np.integer) or some.ndim != 1:
        what = "float labels" if some.ndim == 1 else f"vectors of {some.shape[1]} numbers as labels"
        raise PlanError(
            f"{targets.source} has {what}, but Classification trains with cross entropy, which needs class indices. "
            "Convert it with integer labels, or choose .task(Regression()) or .task(MultiLabel())."
        )
    if targets.range[0] < 0:
        raise PlanError(
            f"{targets.source} has the label {targets.range[0]}, but class indices start at 0. Convert it again."
        )


class MultiLabel(StandardTask):
    """Any number of labels per image: the model returns logits `(B, K)`, targets are vectors `(B, K)` of 0 and 1.

    MixUp and CutMix mix the vectors. A label without a positive sample in the validation data counts as 0 in `map` and
    `f1`; torchmetrics warns of it. One without a positive or without a negative sample does not count in `auroc`.

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
        "auroc": mean_auroc("MultilabelAUROC"),
    }
    DEFAULT_METRICS = ("map", "f1")

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        return targets.long()

    def predict(self, outputs: Any) -> torch.Tensor:
        """Return the probability of each label, `(B, K)`."""
        return torch.sigmoid(outputs)

    probabilities = predict

    def row(self, prediction: Any, classes: Sequence[str]) -> dict[str, Any]:
        """Return the `labels` with a probability of at least 0.5, and all `probabilities` by name."""
        probabilities = dict(zip(names_of(len(prediction), classes), prediction.tolist(), strict=True))
        labels = [name for name, p in probabilities.items() if p >= 0.5]
        return {"labels": labels, "probabilities": probabilities}

    def check(self, train: Targets, val: Targets | None) -> int:
        width = vectors(self, train, val, "a vector of 0 and 1 per image")
        check_names(train, val, "labels")
        for targets in filter(None, (train, val)):
            if targets.some.ndim != 2:
                raise PlanError(
                    f"{targets.source} has one number per image, but MultiLabel needs a vector of 0 and 1. Convert it "
                    "with vectors, or choose .task(Classification())."
                )
            if not targets.facts.binary:
                at = tuple(int(i) for i in np.argwhere((targets.values != 0) & (targets.values != 1))[0])
                raise PlanError(
                    f"{targets.source} has the value {targets.values[at]} in the vector of sample {at[0]}, but "
                    "MultiLabel needs 0 or 1. Convert it again, or choose .task(Regression())."
                )
        return width

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:
        return logits_error(outputs, width, source, "labels")


class Regression(StandardTask):
    """One or more numbers per image: the model returns `(B, K)` for targets `(B, K)`, or `(B, 1)` for targets `(B,)`.

    Args:
        metrics: of `"mae"`, `"mse"`, `"rmse"` and `"r2"` (the mean over the numbers), or torchmetrics objects. Default
            `("mae", "r2")`.
        loss: `"mse"` (the default), `"l1"`, `"huber"`, a function or a module, or `"model"`.
        monitor: default the first metric.
        scale_targets: compute the loss of `(value - mean) / std`, with the mean and the standard deviation of each
            number over the samples that are trained on. They are buffers of the model, `target_mean` and `target_std`,
            `(K,)` float32, and its outputs, the predictions and the metrics are in the units of the targets. Default
            False, because the loss would be another than that of earlier runs and recipes; the plan recommends it for
            targets that are far from 0 or whose standard deviation is far from 1, which a model learns slowly or not
            at all.

    Raises:
        PlanError: for `scale_targets` with `loss="model"`; while building, for targets that are not finite in float32.

    Example::

        >>> pipeline = pipeline.task(Regression(loss="huber", metrics=("mae",)))
        >>> prices = pipeline.task(Regression(scale_targets=True))
    """

    kind: ClassVar[Kind] = "values"
    LOSSES: ClassVar[Mapping[str, LossFunction]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}
    METRICS: ClassVar[Mapping[str, Callable[[int], Any]]] = {
        "mae": maker("MeanAbsoluteError"),
        "mse": maker("MeanSquaredError"),
        "rmse": maker("MeanSquaredError", squared=False),
        "r2": r2,
    }
    DEFAULT_METRICS = ("mae", "r2")
    scale_targets: bool = False
    scale: TargetScale | None = None  # once it is fitted

    def __init__(
        self, *, metrics: Any = None, loss: Any = None, monitor: str | None = None, scale_targets: bool = False
    ) -> None:  # fmt: skip
        super().__init__(metrics=metrics, loss=loss, monitor=monitor)
        if not isinstance(scale_targets, bool):
            raise PlanError(f"Regression: scale_targets={scale_targets!r:.80} must be True or False.")
        if scale_targets and self.loss_in_model:
            raise PlanError(
                "Regression: scale_targets=True scales what a loss receives, but with loss='model' the model computes "
                "its loss itself. Leave one of the two out."
            )
        vars(self).update(scale_targets=scale_targets, _given={**self._given, "scale_targets": scale_targets or None})

    def with_scale(self, scale: TargetScale | None) -> Self:
        """Return the same task, whose loss is of values scaled by `scale`."""
        changed = copy.copy(self)
        vars(changed)["scale"] = scale
        return changed

    def fit_scale(
        self, labels: NDArray[Any], indices: NDArray[np.int64], weights: NDArray[np.float64], source: str
    ) -> TargetScale | None:
        """Return the scale of the targets `indices`; see `target_scale.fit_scale`. Without `scale_targets`, it is only
        for `note`: None if the loss is the model's, or the targets are not finite."""
        if self.loss_in_model:
            return None
        try:
            return fit_scale(labels, indices, weights, source)
        except PlanError:
            if self.scale_targets:
                raise
            return None

    def note(self, scale: TargetScale | None) -> str:
        """Return what the plan and the run print of the targets' scale; "" if there is nothing to note."""
        if scale is None or not (self.scale_targets or scale.needed):
            return ""
        if self.scale_targets:
            return f"Targets scaled: {scale}."
        return (
            f"The targets have {scale}, but a new model's outputs are near 0, so it may learn slowly or not at all. "
            "Regression(scale_targets=True) scales them for the loss."
        )

    @property
    def about(self) -> str:
        return super().about + "; the loss is of scaled targets" * self.scale_targets

    def move(self, device: torch.device) -> LossFunction:
        moved = None if self.scale is None else self.scale.to(device)
        return StandardTask.move(self.with_scale(moved), device)

    def outputs(self, outputs: Any) -> Any:
        """Return the main tensor of a model's output; `(B, 1)` becomes `(B,)`."""
        main = super().outputs(outputs)
        one = isinstance(main, torch.Tensor) and main.dim() == 2 and main.shape[1] == 1
        return main[:, 0] if one else main

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        return flat(targets)

    def model_inputs(self, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return numbers as floats, as the losses of the task get them: torch's have no gradient for integers."""
        return {name: flat(value).float() for name, value in super().model_inputs(targets).items()}

    def loss_targets(self, targets: torch.Tensor) -> torch.Tensor:
        return self._scaled(flat(targets).float())

    def loss_outputs(self, outputs: Any) -> Any:
        return self._scaled(outputs)

    def _scaled(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.scale is None else self.scale.scaled(values)

    def row(self, prediction: Any, classes: Sequence[str]) -> dict[str, Any]:
        """Return the `value`, a number or a list; and of a list whose numbers have names, `values`."""
        value = prediction.tolist()
        if isinstance(value, list) and len(value) == len(classes):
            return {"value": value, "values": dict(zip(names_of(len(value), classes), value, strict=True))}
        return {"value": value}

    def check(self, train: Targets, val: Targets | None) -> int:
        width = vectors(self, train, val, "one or more numbers per image")
        if len(train.classes) == width:  # else they are names of class indices, which no value here is
            check_names(train, val, "values")
        return width

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:
        shape = (2,) if width == 1 else (2, width)
        if isinstance(outputs, torch.Tensor) and outputs.shape == shape:
            return ""
        return (
            f"The model returns {shape_of(outputs)} for 2 images, but {source} has {width} number(s) per image. Build "
            f"it so that it returns (2, {width}): with num_classes={width}; in a recipe: "
            f"model_options.num_classes={width}."
        )


def flat(targets: torch.Tensor) -> torch.Tensor:
    """`(B, 1)` becomes `(B,)`."""
    return targets[:, 0] if targets.dim() == 2 and targets.shape[1] == 1 else targets


AUTO = "auto"
"""Instead of the number of classes: that of the training data, decided when the pipeline is resolved."""

IGNORED = 255
"""The class index of pixels that do not count, as in PASCAL VOC and Cityscapes."""


def cross_entropy(
    outputs: torch.Tensor, targets: torch.Tensor, reduction: Literal["mean", "sum", "none"] = "mean"
) -> torch.Tensor:
    """Of int64 targets: the mean over the pixels that count, 0 if none does; their sum; or each, 0 if it does not."""
    if reduction == "none":
        return F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="none")
    total = F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="sum")
    return total if reduction == "sum" else total / (targets != IGNORED).sum().clamp(min=1)


CLASS_LOSSES.append((cross_entropy, IGNORED))


class Segmentation(StandardTask):
    """One class per pixel: the model returns logits `(B, C, H, W)`, targets are masks `(B, H, W)` of class indices.

    The index 255 marks pixels that do not count. Of a model's dict, `out` is used, as torchvision's have it.

    Args:
        classes: number of classes C; `"auto"`: that of the names in the training data (`convert(classes=…)`), up to the
            last one that counts.
        ignore_index: one or several more values of the masks that do not count, such as a "void" class: the loss (also
            one of your own) and the metrics receive 255 instead, and one of torch's losses the index that it ignores,
            -100 unless it has another. Values from C on do not need an output of the model; a smaller one keeps its
            output, which is never right. Default None: only 255.
        metrics: of `"miou"` (mean intersection over union over the classes, of all pixels of the data) and
            `"pixel_accuracy"`, or torchmetrics objects. Default `("miou", "pixel_accuracy")`.
        loss: default cross entropy over the pixels that count; `"model"`: the one that the model computes.
        monitor: default the first metric.

    Example::

        >>> pipeline = pipeline.task(Segmentation(classes=21))
        >>> Segmentation(11, ignore_index=11).ignored  # CamVid, whose class 11 is void
        (255, 11)
    """

    kind: ClassVar[Kind] = "masks"
    LOSSES: ClassVar[Mapping[str, LossFunction]] = {"cross_entropy": cross_entropy}
    METRICS: ClassVar[Mapping[str, Callable[[int], Any]]] = {
        "miou": maker("MulticlassJaccardIndex", ignore_index=IGNORED),
        "pixel_accuracy": maker("MulticlassAccuracy", average="micro", ignore_index=IGNORED),
    }
    DEFAULT_METRICS = ("miou", "pixel_accuracy")

    def __init__(
        self, classes: int | Literal["auto"], *, ignore_index: int | Sequence[int] | None = None, metrics: Any = None,
        loss: Any = None, monitor: str | None = None,
    ) -> None:  # fmt: skip
        if not is_whole(classes, 2) and classes != AUTO:
            raise PlanError(f"Segmentation: classes={classes!r} must be an integer of at least 2, or 'auto'.")
        also = _label_values(ignore_index)
        if isinstance(classes, int) and classes - sum(value < classes for value in also) < 2:
            raise PlanError(
                f"Segmentation: of classes={classes}, ignore_index={ignore_index!r} leaves fewer than 2 to learn. "
                "Ignore fewer, or pass more classes."
            )
        super().__init__(metrics=metrics, loss=loss, monitor=monitor)
        given = {"classes": classes, "ignore_index": (also[0] if len(also) == 1 else also) if also else None}
        vars(self).update(classes=classes, ignored=(IGNORED, *also), _given={**given, **self._given})

    classes: int
    ignored: tuple[int, ...]

    @property
    def about(self) -> str:
        also = ", ".join(map(str, self.ignored[1:]))
        return f"{super().about}; as 255, pixels of {also} do not count" if also else super().about

    def meters(self, width: int | None) -> dict[str, Metric]:  # noqa: ARG002
        meters = super().meters(self.classes)
        never = [value for value in self.ignored[1:] if value < self.classes]
        # A torchmetrics object equals everything.
        named = [name for name, own in self._metrics.items() if isinstance(own, str) and own == "miou"]
        return meters | {name: mean_iou(self.classes, never) for name in named if never}

    def predict(self, outputs: Any) -> torch.Tensor:
        """Return the class of each pixel, `(B, H, W)`."""
        return torch.argmax(outputs, 1)

    def probabilities(self, outputs: Any) -> Any:
        return torch.softmax(outputs, dim=1)

    def _counted(self, targets: torch.Tensor) -> torch.Tensor:
        """Return masks as int64, in which 255 stands for all values that do not count."""
        targets = targets.long()
        for value in self.ignored[1:]:
            targets = targets.masked_fill(targets == value, IGNORED)
        return targets

    metric_targets = _counted

    def loss_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the masks of `metric_targets`; for one of torch's losses, with the index that it ignores for 255."""
        counted, own = self._counted(targets), ignored_by(self._criterion)
        if own is None or own == IGNORED:
            return counted
        return counted.masked_fill(counted == IGNORED, own)

    def model_inputs(self, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: self._counted(value) for name, value in super().model_inputs(targets).items()}

    def check(self, train: Targets, val: Targets | None) -> int:
        for targets in filter(None, (train, val)):
            if targets.largest is None:
                raise PlanError(
                    f"{targets.source} has one label per image, but Segmentation needs a mask per image. Convert it "
                    "from pairs of an image and a mask, or with labels=FOLDER_OF_MASKS."
                )
            named = [value + 1 for value in range(len(targets.classes)) if value not in self.ignored]
            found = max([targets.largest + 1, *named[-1:]])
            if found > self.classes:
                raise PlanError(
                    f"{targets.source} has {found} classes, but the task has classes={self.classes}. Pass "
                    f"Segmentation({found}); {IGNORED} is for pixels that do not count, as are the values of "
                    "ignore_index."
                )
        check_names(train, val, "classes")
        return self.classes

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:  # noqa: ARG002
        logits = isinstance(outputs, torch.Tensor) and outputs.dim() == 4
        if logits and outputs.shape[:2] == (2, self.classes):
            return ""
        return (
            f"The model returns {shape_of(outputs)} for 2 images, but {self} needs logits per pixel, "
            f"(2, {self.classes}, H, W). Build it with num_classes={self.classes}; in a recipe: "
            f"model_options.num_classes={self.classes}."
        )


def _label_values(given: Any) -> tuple[int, ...]:
    values = () if given is None else (given,) if is_whole(given, 0) else given
    if not isinstance(values, Sequence) or not all(is_whole(value, 0, 65535) for value in values):
        raise PlanError(
            f"Segmentation: ignore_index={given!r:.80} must be a value of the masks, 0 to 65535, or a list of them."
        )
    return tuple(sorted({int(value) for value in values} - {IGNORED}))


def mean_iou(classes: int, never: Sequence[int]) -> Metric:
    """Return torchmetrics' mean intersection over union, without the classes `never` in the mean."""
    from torchmetrics.classification import MulticlassJaccardIndex

    class MeanIoU(MulticlassJaccardIndex):
        unit = "fraction"

        def compute(self) -> torch.Tensor:
            confusion: Any = self.confmat
            right = confusion.diagonal()
            union = confusion.sum(0) + confusion.sum(1) - right
            union[list(never)] = 0
            ratios: torch.Tensor = right[union > 0] / union[union > 0]
            return ratios.sum() / max(len(ratios), 1)

    return MeanIoU(classes, ignore_index=IGNORED, validate_args=False)
