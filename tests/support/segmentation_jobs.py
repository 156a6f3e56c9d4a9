"""Pictures with masks, a small network for them, and its pipeline; ranks import them from here."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from drivetrain import Pipeline, Segmentation
from drivetrain.loaders import convert
from loader_pictures import picture
from numpy.typing import NDArray
from torch import nn

CLASSES = ("ground", "red", "green")
SIDE, TRAIN, VAL = 24, 64, 21
Files = tuple[str, str]


def scene(seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A picture of its own size with a red and a green patch, and its mask; one row does not count."""
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(28, 44, 2))
    image, mask = picture(seed, height, width) // 3, np.zeros((height, width), np.uint8)
    for label in (1, 2):
        top, left = rng.integers(0, height - 12), rng.integers(0, width - 12)
        place = slice(top, top + 12), slice(left, left + 12)
        image[place][..., label - 1] += 150
        mask[place] = label
        other = 2 - label  # the other channel of red and green
        image[place][..., other] = image[place][..., other] // 4
    mask[height // 2, :] = 255
    return image, mask


def write(folder: Path) -> Files:
    files = str(folder / "train.beton"), str(folder / "val.beton")
    for path, seeds in zip(files, (range(TRAIN), range(1000, 1000 + VAL)), strict=True):
        convert([*map(scene, seeds)], path, classes=CLASSES, progress=False)
    return files


class Net(nn.Module):
    """Logits per pixel, `(B, num_classes, H, W)`, in a dict as torchvision's models return them."""

    def __init__(self, num_classes: int, container: str = "dict") -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, num_classes, 1)
        )
        self.container = container

    def forward(self, images: torch.Tensor) -> Any:
        logits = self.body(images)
        return {"out": logits} if self.container == "dict" else logits


def pipeline_of(files: Files, norm: bool = True, **distribution: Any) -> Pipeline:
    """A pipeline that segments them; without `norm`, the same on any number of ranks."""
    start = Pipeline(Net if norm else Plain, num_classes=3).task(Segmentation(3))
    start = start.load(*files, batch_size=16, image_size=SIDE, workers=1, scale=(0.5, 1.0))
    start = start.optimize("sgd", lr=0.5, momentum=0.9)
    return start.distribute(**distribution) if distribution else start


class Plain(Net):
    """Without BatchNorm, whose statistics are those of a rank."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.body[1] = nn.Identity()


def history(files: Files, **options: Any) -> list[tuple[float, ...]]:
    result = pipeline_of(files, norm=False, **options).fit(epochs=2, progress=False)
    return [(e.loss, e.val_loss, *e.metrics.values()) for e in result.history.epochs]


def on_two_ranks(files: Files) -> dict[str, list[tuple[float, ...]]]:
    return {strategy: history(files, strategy=strategy, devices=2) for strategy in ("ddp", "fsdp")}
