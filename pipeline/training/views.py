"""The forward of several views per image: the model sees a batch of images, and its outputs get the views back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..tasks.nests import map_tensors


def forward(model: Callable[..., Any], images: torch.Tensor, **inputs: torch.Tensor) -> Any:
    """Return the model's outputs for images `(B, 3, H, W)`; for views `(B, V, 3, H, W)`, outputs `(B, V, …)`.

    All views are one batch, so that BatchNorm has the statistics of all of them.
    """
    if images.dim() != 5:  # also of another kind of data, in a loop of one's own
        return model(images, **inputs)
    shape = images.shape[:2]
    outputs = model(images.flatten(0, 1), **inputs)
    return map_tensors(lambda output: output.view(*shape, *output.shape[1:]), outputs)
