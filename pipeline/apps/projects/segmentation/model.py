"""The model of @name@, and a transform. recipe.yaml names them model:Net and model:Gray."""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from drivetrain.transforms import Transform
from torch import nn


class Net(nn.Module):
    """A small U-Net. Its arguments are the model_options in recipe.yaml."""

    def __init__(self, num_classes, width=16):
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.first = convs(3, width)
        self.down = nn.ModuleList(convs(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(convs(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images):
        """From images (B, 3, H, W) to logits of each pixel, (B, num_classes, H, W)."""
        levels = [self.first(images)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        features = levels.pop()
        for up in reversed(self.up):
            level = levels.pop()
            features = up(torch.cat([level, F.interpolate(features, level.shape[2:])], 1))
        return self.head(features)


def convs(inputs, outputs):
    return nn.Sequential(*conv(inputs, outputs), *conv(outputs, outputs))


def conv(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


@dataclass(frozen=True)
class Gray(Transform):
    """In training, make some of the images gray. Evaluation uses them as they are."""

    probability: float = 0.1
    kind = "batch"
    source = "@name@"
    depends_on_length = False  # so that a run can be resumed with more epochs

    def batch(self, images, targets, context):
        gray = torch.rand(len(images), 1, 1, 1, generator=context.generator) < self.probability
        gray = gray.to(images.device, non_blocking=True)
        return torch.where(gray, images.mean(1, keepdim=True), images), targets
