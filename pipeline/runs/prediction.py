"""Predict single images with a trained model: the right preprocessing, and answers with names."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from ...common.errors import DataError
from ..describe.inputs import Inputs
from ..tasks.nests import map_tensors, to_float
from ..tasks.task import Task
from ..training.build import plain_torch

BATCH = 32  # images at once: enough for speed, little memory


@plain_torch()
def predict(
    model: nn.Module, task: Task, inputs: Inputs, images: Any, *, batch_size: int = BATCH
) -> list[dict[str, Any]]:
    """Return one dict per image; see `FitResult.predict`."""
    given = _listed(images, inputs.channels)
    if not given:
        return []
    transform, rows = inputs.transform(), []
    training, device = model.training, next((p.device for p in model.parameters()), torch.device("cpu"))
    model.eval()
    try:
        for start in range(0, len(given), batch_size):
            part = given[start : start + batch_size]
            batch = torch.stack([transform(image) for image in part]).to(device)
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


def _listed(images: Any, channels: int) -> list[Any]:
    one = isinstance(images, str | Path | bytes | Image.Image)
    if isinstance(images, np.ndarray):  # of one channel, (N, H, W) are several
        one = images.ndim == 2 or (images.ndim == 3 and (channels > 1 or images.shape[2] == 1))
    if not one and not isinstance(images, Iterable):
        raise DataError(f"predict() takes paths or images, not a {type(images).__name__}.")
    return [images] if one else list(images)


def _name(image: Any, number: int) -> str | int:
    return str(image) if isinstance(image, str | Path) else number
