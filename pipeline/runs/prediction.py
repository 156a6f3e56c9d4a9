"""Predict single images with a trained model: the right preprocessing, and answers with names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from PIL import Image
from torch import nn

from ...errors import DataError
from ...loaders.epochs import EpochLoader
from ..tasks.nests import map_tensors, to_float
from ..tasks.task import Task

if TYPE_CHECKING:
    from torchvision.transforms import v2

BATCH = 32  # images at once: enough for speed, little memory


@dataclass(frozen=True)
class Inputs:
    """What an image must become before the model sees it, and the names of what the model returns.

    Attributes:
        image_size: side of the images in evaluation, in pixels.
        eval_ratio: the central crop's side relative to the image's shorter side.
        mean, std: of each channel, for pixels scaled to 0–1.
        interpolation: `"bilinear"` or `"area"`.
        classes: names of the classes or labels; empty if the data has none.
    """

    image_size: int
    eval_ratio: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, train: EpochLoader, val: EpochLoader | None, eval_size: int) -> Self:
        """Return that of a training's loaders."""
        used = (val or train).settings
        return cls(
            eval_size,
            used.eval_ratio,
            tuple(used.mean),
            tuple(used.std),
            used.interpolation,
            tuple(train.classes),
        )

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Return what `to_dict` gave."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
        }
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }

    def transform(self) -> v2.Compose:
        """Return the torchvision transform of a PIL image."""
        from ...loaders.preprocess import evaluation_transform

        return evaluation_transform(self.image_size, self.eval_ratio, self.mean, self.std, self.interpolation)


def predict(
    model: nn.Module, task: Task, inputs: Inputs, images: Any, *, batch_size: int = BATCH
) -> list[dict[str, Any]]:
    """Return one dict per image; see `FitResult.predict`."""
    given = _listed(images)
    if not given:
        return []
    transform, rows = inputs.transform(), []
    training, device = model.training, next((p.device for p in model.parameters()), torch.device("cpu"))
    model.eval()
    try:
        for start in range(0, len(given), batch_size):
            part = given[start : start + batch_size]
            batch = torch.stack([transform(_opened(image)) for image in part]).to(device)
            with torch.no_grad():
                predictions = task.predict(to_float(task.outputs(model(batch))))
            predictions = map_tensors(torch.Tensor.cpu, predictions)
            rows += [
                {
                    "image": _name(image, start + n),
                    **task.row(map_tensors(itemgetter(n), predictions), inputs.classes),
                }
                for n, image in enumerate(part)
            ]
    finally:
        model.train(training)
    return rows


def _listed(images: Any) -> list[Any]:
    one = isinstance(images, str | Path | Image.Image) or (
        isinstance(images, np.ndarray) and images.ndim == 3
    )
    if not one and not isinstance(images, Iterable):
        raise DataError(f"predict() takes paths or images, not a {type(images).__name__}.")
    return [images] if one else list(images)


def _opened(image: Any) -> Any:
    if not isinstance(image, str | Path):
        return image
    try:
        with Image.open(image) as file:
            return file.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{image} cannot be read as an image: {error}.") from error


def _name(image: Any, number: int) -> str | int:
    return str(image) if isinstance(image, str | Path) else number
