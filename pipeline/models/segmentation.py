"""A network that returns a class for each pixel, on the features of one of timm's."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from .libraries import timm_model


class FPN(nn.Module):
    """Panoptic FPN's semantic branch (Kirillov et al. 2019, arXiv:1901.02446, section 3): each level of a pyramid of
    features, with 1/4 to 1/32 of the image's resolution, becomes `width` channels at 1/4, and their sum the logits. Of
    its convolutions on each level, this has one, with BatchNorm instead of GroupNorm."""

    def __init__(self, backbone: nn.Module, channels: list[int], num_classes: int, width: int) -> None:
        super().__init__()
        self.backbone = backbone
        self._channels_last = getattr(backbone, "output_fmt", "") == "NHWC"  # of some of timm's, such as Swin
        self.lateral = nn.ModuleList(nn.Conv2d(own, width, 1) for own in channels)
        self.smooth = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for _ in channels
        )
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """From images `(B, 3, H, W)` to logits `(B, num_classes, H, W)`."""
        levels = [each.movedim(-1, 1) if self._channels_last else each for each in self.backbone(images)]
        top = total = None
        for level, lateral, smooth in reversed([*zip(levels, self.lateral, self.smooth, strict=True)]):
            own = lateral(level)
            top = own if top is None else own + interpolate(top, own.shape[2:])
            part = _resized(smooth(top), levels[0].shape[2:])
            total = part if total is None else total + part
        return _resized(self.head(total), images.shape[2:])


def _resized(features: torch.Tensor, size: torch.Size) -> torch.Tensor:
    return features if features.shape[2:] == size else interpolate(features, size, mode="bilinear")


def fpn(num_classes: int, backbone: str = "resnet18d", width: int = 128, pretrained: bool = False) -> nn.Module:
    """Build an FPN for segmentation on the last four levels of features of `backbone`, one of timm's models;
    `pretrained`: with timm's weights. `width`: channels of each level; the default is the paper's."""
    features: Any = timm_model(backbone)(pretrained=pretrained, features_only=True, out_indices=(-4, -3, -2, -1))
    return FPN(features, features.feature_info.channels(), num_classes, width)
