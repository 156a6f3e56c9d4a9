"""Custom transforms, in a module that a recipe can name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from drivetrain.transforms import Report, Transform
from torch import nn


@dataclass(frozen=True)
class GaussianNoise(Transform):
    """Adds noise to images."""

    std: float = 0.1
    kind = "batch"
    source = "custom"
    depends_on_length = False

    def batch(self, images: Any, targets: Any, context: Any) -> Any:
        noise = torch.randn(images.shape, generator=context.generator)
        return images + self.std * noise.to(images), targets


@dataclass(frozen=True)
class Smooth(Transform):
    """Replaces ReLU by Softplus."""

    kind = "surgery"
    source = "custom"

    def apply(self, model: nn.Module) -> Report:
        places = [name for name, module in model.named_children() if isinstance(module, nn.ReLU)]
        for name in places:
            setattr(model, name, nn.Softplus())
        return Report("Smooth", changed=tuple(places))
