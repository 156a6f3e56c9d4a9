"""Models, layers and images for the tests of BlurPool, and an independent implementation of its filter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock, ResNet


class Arbitrary(nn.Module):
    """A convolution registered twice, a pool, a linear layer, and a functional call in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.again = self.down
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.relu(self.down(self.stem(x))))
        return self.head(self.pool(x).mean((2, 3)))


def small_resnet() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)


def small_convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=5)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (torchvision.models.resnet18, 7),
    "basic_blocks": (small_resnet, 7),
    "convnext": (small_convnext, 1),
    "arbitrary": (Arbitrary, 2),
}
models = pytest.mark.parametrize(("factory", "count"), MODELS.values(), ids=MODELS)


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 32, 32)), generator=torch.Generator().manual_seed(0))


def strided(**options: object) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(16, 16, **{"kernel_size": 3, "stride": 2, "padding": 1, **options})  # type: ignore[arg-type]


def dense_blur(x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    """The filter written as nine shifted sums."""
    padded, height, width = F.pad(x, (1, 1, 1, 1)), x.shape[-2], x.shape[-1]
    out = torch.zeros_like(x)
    for i, a in enumerate((1, 2, 1)):
        for j, b in enumerate((1, 2, 1)):
            out += a * b / 16 * padded[..., i : i + height, j : j + width]
    return out[..., ::stride, ::stride]
