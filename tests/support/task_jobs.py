"""Models, targets and pipelines of the tests of tasks; ranks import them from here."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from drivetrain import Classification, MultiLabel, Pipeline, Regression, Task
from drivetrain.loaders import convert
from loader_pictures import picture
from numpy.typing import NDArray
from torch import nn

SIDE, TRAIN, VAL, LABELS = 16, 96, 33, 3


def images(number: int, seed: int) -> NDArray[np.uint8]:
    """`(N, 16, 16, 3)`; the mean of each channel differs from image to image."""
    rng = np.random.default_rng(seed)
    waves = np.stack([picture(seed * 1000 + n, SIDE, SIDE) for n in range(number)]) // 4
    return (waves + rng.integers(0, 190, (number, 1, 1, 3))).astype(np.uint8)


def vectors(pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Whether each channel is bright, `(N, 3)`: what a linear layer can learn."""
    return (pictures.mean((1, 2)) > 127).astype(np.float32)


def numbers_of(pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A weighted mean of the channels, `(N,)`."""
    return (pictures.mean((1, 2)) @ [0.5, 0.3, -0.2] / 100).astype(np.float32)


def prices(pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
    return 180_000 + 75_000 * numbers_of(pictures)


def write(folder: Path, targets: Any) -> tuple[str, str]:
    files = str(folder / "train.beton"), str(folder / "val.beton")
    for path, pictures in zip(files, (images(TRAIN, 1), images(VAL, 2)), strict=True):
        convert((pictures, targets(pictures)), path, progress=False)
    return files


class Outputs(nn.Module):
    """A small model that returns its `outputs` in a container, as models of other libraries do."""

    def __init__(self, num_classes: int, container: str = "tensor") -> None:
        super().__init__()
        layers = nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        self.features = nn.Sequential(*layers)
        self.head, self.container = nn.Linear(32, num_classes), container

    def forward(self, images: torch.Tensor) -> Any:
        features = self.features(images)
        logits = self.head(features)
        if self.container == "tuple":
            return logits, features
        if self.container == "dict":
            return {"features": features, "logits": logits}
        return logits


class Cosine(Task):
    """A task of one's own: two outputs, a loss over a nest of tensors."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        logits = outputs["logits"][:, 0]
        return self.weight * ((logits - targets) ** 2).mean() + 0.001 * outputs["features"].square().mean()

    def metrics(self) -> Any:
        from torchmetrics import MeanMetric

        class Distance(MeanMetric):
            higher_is_better = False

            def update(self, outputs: Any, targets: torch.Tensor) -> None:  # type: ignore[override]
                super().update((outputs["logits"][:, 0] - targets).abs())

        return {"distance": Distance()}

    monitor = "distance"


TASKS: dict[str, Any] = {
    "MultiLabel": (MultiLabel(metrics=("map", "f1", "auroc")), vectors, LABELS, "tensor"),
    "Regression": (Regression(metrics=("mae", "rmse", "r2")), numbers_of, 1, "tensor"),
    "Regression of vectors": (
        Regression(loss="l1"), lambda p: p.mean((1, 2)).astype(np.float32) / 100, 3, "tensor",
    ),
    "Regression of scaled values": (Regression(scale_targets=True), prices, 1, "dict"),
    "Classification": (
        Classification(metrics=("top1", "top2", "f1", "auroc")), lambda p: p.mean((1, 2)).argmax(1), 3, "tuple",
    ),
    "your own": (Cosine(2.0), numbers_of, 1, "dict"),
}  # fmt: skip
"""By name: the task, the targets of images, the model's outputs per image, and what it returns them in."""


def pipeline_of(name: str, files: tuple[str, str], **distribution: Any) -> Pipeline:
    task, _, width, container = TASKS[name]
    start = Pipeline(Outputs, num_classes=width, container=container).task(task)
    start = start.load(*files, batch_size=32, image_size=SIDE, flip=False, workers=1)
    start = start.optimize("sgd", lr=0.05, momentum=0.9)
    return start.distribute(**distribution) if distribution else start


def history(result: Any) -> list[tuple[float, ...]]:
    return [(e.loss, e.val_loss, *e.metrics.values()) for e in result.history.epochs]
