"""Small models that the surgeries meet, of torchvision, timm and plain PyTorch; all take (B, 3, 32, 32).

timm is imported where a model needs it: that takes two seconds, and most ranks train none of its models.
"""

from typing import Any

import torch
from torch import nn
from torchvision.models import VisionTransformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock, Bottleneck


def shortcut(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs))


def between(*blocks: nn.Module, width: int) -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def small() -> nn.Module:
    """Five classes from one convolution, with the same weights each time."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, 5))


def resnet() -> nn.Module:
    """torchvision's has 64 to 512 channels; this one 16 to 64."""
    second, third = BasicBlock(16, 32, 2, shortcut(16, 32)), BasicBlock(32, 64, 2, shortcut(32, 64))
    return between(BasicBlock(16, 16), second, third, width=64)


def bottlenecks() -> nn.Module:
    return between(Bottleneck(16, 4), Bottleneck(16, 8, 2, shortcut(16, 32)), width=32)


def convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 2)], num_classes=5)


def vit() -> nn.Module:
    made = VisionTransformer(32, 8, 2, 3, 24, 48, dropout=0.1, num_classes=5)
    nn.init.normal_(made.heads.head.weight)  # torchvision's zeros would hide everything
    return made


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=5, **options)


def timm_resnet() -> nn.Module:
    return timm_model("test_resnet")


def timm_convnext() -> nn.Module:
    return timm_model("convnext_atto", conv_mlp=False, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))


def timm_vit() -> nn.Module:
    return timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)


class Mixed(nn.Module):
    """A convolution and a dropout registered twice, group norm, a convolution with reflected edges."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, padding_mode="reflect")
        self.norm = nn.GroupNorm(4, 32)
        self.conv = nn.Conv2d(32, 32, 3, padding=1)
        self.again = self.conv
        self.drop = nn.Dropout(0.3)
        self.wide = nn.Linear(32, 64)
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(torch.relu(self.conv(self.norm(self.stem(x)))))
        return self.head(torch.relu(self.wide(self.drop(x.amax((2, 3))))))


def images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))
