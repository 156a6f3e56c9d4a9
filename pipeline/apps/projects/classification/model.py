"""The model of @name@, and a transform. recipe.yaml names them model:Net and model:Gray."""

from dataclasses import dataclass

import torch
from drivetrain.transforms import Transform
from torch import nn


class Net(nn.Module):
    """A small residual network. Its arguments are the model_options in recipe.yaml."""

    def __init__(self, num_classes, width=32):
        super().__init__()
        self.body = nn.Sequential(
            conv(3, width, stride=2),
            Block(width, 2 * width),
            Block(2 * width, 4 * width),
            Block(4 * width, 8 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images):
        """From images (B, 3, H, W) to logits (B, num_classes)."""
        return self.head(self.body(images))


class Block(nn.Module):
    """Two convolutions and a shortcut; half the height and width."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.shortcut = conv(inputs, outputs, stride=2)
        self.convs = nn.Sequential(conv(outputs, outputs), conv(outputs, outputs))

    def forward(self, images):
        halved = self.shortcut(images)
        return halved + self.convs(halved)


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


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
