"""Pictures with boxes, keypoints and classes, and a task that trains on them; ranks import it from here."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from drivetrain import Pipeline, Task
from drivetrain.loaders import convert
from numpy.typing import NDArray
from torch import nn
from torchmetrics import MeanMetric

HEIGHT, WIDTH, SIDE, TRAIN, VAL = 120, 200, 64, 32, 11
NAMES = ("ground", "car", "cat")
FIELDS = ("boxes", "points", "classes", "weight")
KINDS = {"boxes": "boxes", "points": "keypoints", "classes": "json", "weight": "float"}


def plane() -> NDArray[np.uint8]:
    """A picture whose pixels are where they are: red is the column, green the row, blue 128."""
    rows, columns = np.indices((HEIGHT, WIDTH))
    return np.stack([columns, rows, np.full_like(rows, 128)], 2).astype(np.uint8)


def places(number: int) -> tuple[NDArray[np.float32], NDArray[np.float32], list[int]]:
    """One to three boxes `(n, 4)` beside each other, points `(n, 2)` in their middles, and classes, all different."""
    rng = np.random.default_rng(number)
    count = 1 + number % 3
    band = WIDTH // count
    sizes = rng.uniform((25, 20), (band - 10, 60), (count, 2))
    corners = rng.uniform(5, np.array([band - 5, HEIGHT - 5]) - sizes) + [[band * n, 0] for n in range(count)]
    boxes = np.concatenate([corners, corners + sizes], 1)
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2 - 0.5  # of pixels, whose centers are whole numbers
    return boxes.astype(np.float32), middles.astype(np.float32), [*range(count)]


def sample(number: int) -> dict[str, Any]:
    boxes, points, classes = places(number)
    further = {"boxes": boxes, "points": points, "classes": classes, "weight": 1 + number % 2}
    return {"image": plane(), "label": number % 3, **further}


def write(folder: Path) -> tuple[str, str]:
    files = str(folder / "train.beton"), str(folder / "val.beton")
    for path, numbers in zip(files, (range(TRAIN), range(100, 100 + VAL)), strict=True):
        data = [sample(number) for number in numbers]
        convert(data, path, fields=KINDS, classes=NAMES, write_mode="raw", progress=False)
    return files


class Error(MeanMetric):
    higher_is_better = False

    def update(self, outputs: Any, targets: Any) -> None:  # type: ignore[override]
        super().update((outputs - wanted(targets)).abs().mean(1))


class Middle(Task):
    """Where the boxes and the points of a picture are on average; of each picture, by its weight."""

    monitor = "error"

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        weight = targets[4]
        return ((outputs - wanted(targets)).square().mean(1) * weight).sum() / weight.sum()

    def denominator(self, targets: Any) -> torch.Tensor:
        return targets[4].sum()

    def metrics(self) -> dict[str, Error]:
        return {"error": Error()}


def wanted(targets: Any) -> torch.Tensor:
    """`(B, 6)`, as fractions of the side."""
    labels, boxes, points, classes, weight = targets
    assert len({len(each) for each in targets}) == 1
    assert all(len(own) == len(at) == len(kinds) for own, at, kinds in zip(boxes, points, classes, strict=True))
    assert labels.shape == weight.shape
    both = [torch.cat([own.mean(0), at.mean(0)]) for own, at in zip(boxes, points, strict=True)]
    return torch.stack(both) / SIDE


def pipeline_of(files: tuple[str, str], load: Any = None, **distribution: Any) -> Pipeline:
    start = Pipeline(small_model).task(Middle())
    options = {"batch_size": 16, "image_size": SIDE, "workers": 1, "fields": FIELDS, **(load or {})}
    start = start.load(*files, **options).optimize("sgd", lr=0.1, momentum=0.9)
    return start.distribute(**distribution) if distribution else start


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 6))


def history(files: tuple[str, str], **options: Any) -> list[tuple[float, ...]]:
    result = pipeline_of(files, **options).fit(epochs=2, progress=False)
    return [(each.loss, each.val_loss, *each.metrics.values()) for each in result.history.epochs]


def on_two_ranks(files: tuple[str, str]) -> list[tuple[float, ...]]:
    return history(files, strategy="ddp", devices=2)
