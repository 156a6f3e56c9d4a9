"""Two small networks for CIFAR-10: the quickstart's narrow ResNet, and airbench's network."""

import torch
from torch import nn


def cifar_resnet(num_classes: int = 10, width: int = 16, channels: int = 3) -> nn.Module:
    """Build a residual network for images of 32 × 32 pixels: the shape of David Page's ResNet-9 ("How to train your
    ResNet", 2018), with a width of 16 instead of 64, 154,000 parameters, so that a CPU trains it in seconds."""
    w = width
    return nn.Sequential(
        _conv(channels, w),
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
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Residual(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return input + output


def airbench_net(
    num_classes: int = 10, widths: tuple[int, int, int] = (64, 256, 256), bias_lr: float = 64.0
) -> nn.Module:
    """Build airbench94's network for images of 32 × 32 pixels, with two million parameters: a frozen whitening
    convolution, three groups of two convolutions initialized to the identity, GELU, BatchNorm without a scale, and a
    last layer whose output is divided by 9. Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024,
    arXiv:2404.00498."""
    first = Whitening()
    ends = (first.out_channels, *widths)
    return nn.Sequential(
        first,
        nn.GELU(),
        *(_group(inputs, outputs, bias_lr) for inputs, outputs in zip(ends, widths, strict=False)),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        _ScaledLinear(widths[-1], num_classes),
    )


_COLORS = ((1, 1, 1), (1, 0, -1), (1, -2, 1))
"""Gray, red minus blue, and both minus green: nearly the principal components of natural colors."""
_EDGES = (((1, 1), (1, 1)), ((1, 1), (-1, -1)), ((1, -1), (1, -1)), ((1, -1), (-1, 1)))
"""The Haar basis of 2 × 2 pixels: mean, rows, columns, checkerboard."""
_VARIANCES = ((10.05, 0.394, 0.331, 0.0553), (0.830, 0.0168, 0.0142, 0.0017), (0.185, 0.0050, 0.0045, 0.0006))
"""The mean square of each color in each pattern (both of norm 1), over all 2 × 2 patches of CIFAR-10's 50,000 training
images, normalized to mean 0 and standard deviation 1 per channel; measured 2026-11-20."""


class Whitening(nn.Conv2d):
    """A frozen convolution from `(B, 3, H, W)` to `(B, 24, H - 1, W - 1)` whose outputs, on normalized CIFAR-10, are
    weakly correlated and have a mean square near 1; the last 12 are the first 12, negated. Airbench uses the principal
    components of the images' 2 × 2 patches. A factory has no data, so these are products of colors and edges, which are
    close (no two outputs correlate above 0.27); only the 12 variances are CIFAR-10's. The bias is trained."""

    def __init__(self) -> None:
        super().__init__(3, 24, 2)
        self.weight.requires_grad_(False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        tensor = self.weight.new_tensor  # same device and dtype
        colors, edges = tensor(_COLORS), tensor(_EDGES) / 2
        colors /= colors.norm(dim=1, keepdim=True)
        scales = (tensor(_VARIANCES) + 5e-4).rsqrt()  # airbench's ε, for variances near 0
        filters = torch.einsum("ab,ac,bij->abcij", scales, colors, edges).flatten(0, 1)
        self.weight.copy_(torch.cat([filters, -filters]))
        nn.init.zeros_(self.bias)  # type: ignore[arg-type]


def _group(inputs: int, outputs: int, bias_lr: float) -> nn.Sequential:
    return nn.Sequential(
        _identity_conv(inputs, outputs), nn.MaxPool2d(2), *_norm(outputs, bias_lr), nn.GELU(),
        _identity_conv(outputs, outputs), *_norm(outputs, bias_lr), nn.GELU(),
    )  # fmt: skip


def _identity_conv(inputs: int, outputs: int) -> nn.Conv2d:
    """Its first output channels are initialized to the input, the others randomly."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[: min(inputs, outputs)])
    return conv


def _norm(channels: int, bias_lr: float) -> tuple[nn.Module, nn.Module]:
    # Airbench's statistics keep 0.6 of the old value; torch's momentum is the weight of the new one.
    return nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4, affine=False), Shift(channels, bias_lr)


class Shift(nn.Module):
    """Add √`lr_factor` · bias to each channel: with SGD, it moves like a plain bias at `lr_factor` times the learning
    rate, but decays at the plain rate, since the root is a factor of the gradient and the shift only."""

    def __init__(self, channels: int, lr_factor: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))
        self.root = lr_factor**0.5

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shift: torch.Tensor = (self.root * self.bias).to(input.dtype)
        return input + shift[:, None, None]


class _ScaledLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(input)
        return logits / 9
