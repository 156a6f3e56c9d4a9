"""Regression: one or more numbers per image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from .means import LossFunction
from .metrics import maker
from .task import Kind, StandardTask, Targets, shape_of, vectors


class Regression(StandardTask):
    """One or more numbers per image: the model returns `(B, K)` for targets `(B, K)`, or `(B, 1)` for targets `(B,)`.

    Args:
        metrics: of `"mae"`, `"mse"`, `"rmse"` and `"r2"` (the mean over the numbers), or torchmetrics objects. Default
            `("mae", "r2")`.
        loss: `"mse"` (the default), `"l1"`, `"huber"`, a function or a module, or `"model"`.
        monitor: default the first metric.

    Example::

        >>> pipeline = pipeline.task(Regression(loss="huber", metrics=("mae",)))
    """

    kind: ClassVar[Kind] = "values"
    LOSSES: ClassVar[Mapping[str, LossFunction]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}
    METRICS: ClassVar[Mapping[str, Callable[[int], Any]]] = {
        "mae": maker("MeanAbsoluteError"),
        "mse": maker("MeanSquaredError"),
        "rmse": maker("MeanSquaredError", squared=False),
        "r2": maker("R2Score"),
    }
    DEFAULT_METRICS = ("mae", "r2")

    def outputs(self, outputs: Any) -> Any:
        """Return the main tensor of a model's output; `(B, 1)` becomes `(B,)`."""
        main = super().outputs(outputs)
        one = isinstance(main, torch.Tensor) and main.dim() == 2 and main.shape[1] == 1
        return main[:, 0] if one else main

    def metric_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the targets in the shape of the outputs."""
        return flat(targets)

    def model_inputs(self, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the numbers as `labels` for a model that computes the loss."""
        return {name: flat(value) for name, value in super().model_inputs(targets).items()}

    def loss_targets(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the targets in the shape of the outputs, as floating-point numbers."""
        return flat(targets).float()

    def row(self, prediction: Any, classes: Sequence[str]) -> dict[str, Any]:
        """Return the `value`: a number, or a list of numbers; and of a list whose numbers have names, `values` by
        name."""
        value = prediction.tolist()
        if isinstance(value, list) and len(value) == len(classes):
            return {"value": value, "values": dict(zip(classes, value, strict=True))}
        return {"value": value}

    def check(self, train: Targets, val: Targets | None) -> int:
        """Return how many numbers each target has.

        Raises:
            PlanError: if they are not finite numbers, or the two sources differ.
        """
        return vectors(self, train, val, "one or more numbers per image")

    def output_error(self, outputs: Any, width: int | None, source: str) -> str:
        shape = (2,) if width == 1 else (2, width)
        if isinstance(outputs, torch.Tensor) and outputs.shape == shape:
            return ""
        found = shape_of(outputs)
        return (
            f"The model returns {found} for 2 images, but {source} has {width} number(s) per image. Build it so that "
            f"it returns (2, {width}): with num_classes={width}; in a recipe: model_options.num_classes={width}."
        )


def flat(targets: torch.Tensor) -> torch.Tensor:
    """Return targets `(B, 1)` as `(B,)`, others unchanged."""
    return targets[:, 0] if targets.dim() == 2 and targets.shape[1] == 1 else targets
