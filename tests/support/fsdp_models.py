"""Small models that the FSDP tests train; all take (B, 3, 16, 16) and give (B, 5)."""

import torch
from surgery_models import between, shortcut
from torch import nn
from torchvision.models.resnet import BasicBlock


def resnet() -> nn.Module:
    return between(BasicBlock(16, 16), BasicBlock(16, 24, 2, shortcut(16, 24)), width=24)


class Transformer(nn.Module):
    """Patches, two pre-norm encoder layers, a head.

    Without biases: the gradient of an attention's key bias is rounding only, and Adam makes full steps of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4, bias=False)
        self.position = nn.Parameter(torch.randn(1, 16, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True, bias=False)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.layers(x).mean(1))


class Tied(nn.Module):
    """The first block's weight is also the head's; one block runs twice; a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(5, 5)
        self.head.weight = self.blocks[0][0].weight
        self.register_buffer("scale", torch.full((5,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, 0, 0, :5] * self.scale
        for number in (0, 1, 2, 1):
            x = self.blocks[number](x)
        return self.head(x)


class Late(nn.Module):
    """Of its branches the second is used from the third training forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.forwards = nn.Linear(48, 5), nn.Linear(48, 5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        x = x[:, :, :4, :4].flatten(1)
        return self.first(x) + self.second(x) if self.forwards > 2 else self.first(x)


def frozen() -> nn.Module:
    """A block whose parameters do not train, and a bias in one that does."""
    model = resnet()
    model[4].requires_grad_(False)
    model[5].bn1.bias.requires_grad_(False)
    return model


def one_layer() -> nn.Module:
    return nn.Conv2d(3, 5, 16)  # its output is (B, 5, 1, 1)


def channels_last() -> nn.Module:
    return resnet().to(memory_format=torch.channels_last)
