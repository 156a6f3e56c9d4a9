"""Models by name, for recipes: torchvision's, and the narrow residual network of the quickstart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import RecipeError, suggest


def model_factory(name: str) -> Callable[..., nn.Module]:
    """The factory of a model: `"cifar_resnet"`, or any name of `torchvision.models.list_models()`.

    Raises:
        RecipeError: if no model has the name, with the nearest one.
    """
    if name == "cifar_resnet":
        return cifar_resnet
    import torchvision  # here, because it takes 3 s

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise RecipeError(f"No model is named {name!r}.{suggest(name, ['cifar_resnet', *known])}")
    factory: Callable[..., nn.Module] = torchvision.models.get_model_builder(name)
    return factory


def cifar_resnet(num_classes: int = 10, width: int = 16) -> nn.Module:
    """A narrow residual network for images of 32 × 32 pixels.

    Eight 3×3 convolutions, three max-pools, two residual blocks: the shape of David Page's ResNet-9
    ("How to train your ResNet", 2018), whose width of 64 is cut to what a CPU trains in seconds.

    Args:
        num_classes: of the output, `(B, num_classes)`.
        width: channels after the first layer; 16 is 154,000 parameters.
    """
    w = width
    return nn.Sequential(
        _conv(3, w),
        _conv(w, 2 * w),
        nn.MaxPool2d(2),
        Residual(_conv(2 * w, 2 * w), _conv(2 * w, 2 * w)),
        _conv(2 * w, 4 * w),
        nn.MaxPool2d(2),
        _conv(4 * w, 4 * w),
        nn.MaxPool2d(2),
        Residual(_conv(4 * w, 4 * w), _conv(4 * w, 4 * w)),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * w, num_classes),
    )


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Sequential):
    """Layers whose output is added to their input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(B, C, H, W)` to the same shape."""
        output: torch.Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return input + output
