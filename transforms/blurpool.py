"""BlurPool: a low-pass filter before each subsampling, so that small image shifts matter less. The surgery changes only
the *class* of a module, so an existing optimizer stays valid, and plain weights load before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.errors import PlanError
from .base import Natural, Report, Transform
from .common.surgery import Classes, Verdict, change_class, judge_class, operate


def blur(x: Tensor, stride: tuple[int, int] = (1, 1)) -> Tensor:
    """Filter each channel of (..., C, H, W) with [1 2 1] ⊗ [1 2 1] / 16, zero-padded, and keep every `stride`-th pixel:
    (..., C, ceil(H / stride), ceil(W / stride)), in the same dtype and memory format."""
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        # oneDNN has no fast backward for a depthwise convolution in half precision: 35 ms for
        # (256, 32, 31, 31) in bf16, 3 ms in fp32, 10 ms with both conversions (2 cores, torch 2.15).
        with torch.autocast("cpu", enabled=False):
            return blur(x.float(), stride).to(x.dtype)
    # Rebuilt from x: a buffer would be garbage after meta.to_empty() and stay fp32 when FSDP casts x to bf16; a
    # Python list would be copied to the GPU, with a synchronization, in every forward.
    channels = x.shape[-3]
    row = 2 - torch.arange(-1, 2, device=x.device, dtype=x.dtype).abs()
    # Contiguous: oneDNN's backward takes twice as long with an expanded kernel.
    kernel = torch.outer(row, row / 16).expand(channels, 1, 3, 3).contiguous()
    return F.conv2d(x, kernel, stride=stride, padding=1, groups=channels)


class BlurConv2d(nn.Conv2d):
    """A convolution that blurs its input or, with `blur_first=False`, its output at stride 1."""

    blur_first: bool = True

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Not in forward, because WeightStandardization's subclass passes a different weight.
        if self.blur_first:
            return cast(Tensor, super()._conv_forward(blur(input), weight, bias))
        padding: str | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        # self.stride keeps its value: code that reads the module's stride should see its downsampling factor.
        dense = F.conv2d(input, weight, bias, (1, 1), padding, self.dilation, self.groups)
        return blur(dense, _pair(self.stride))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, blur_first={self.blur_first}"  # type: ignore[no-untyped-call]


class BlurMaxPool2d(nn.MaxPool2d):
    """A max-pool that takes the maximum at every pixel, blurs, and then subsamples; same size as `nn.MaxPool2d`'s."""

    def forward(self, input: Tensor) -> Tensor:
        if self.ceil_mode:
            input = F.pad(input, self._ceil_padding(input.shape), value=-torch.inf)
        return blur(F.max_pool2d(input, self.kernel_size, 1, self.padding, self.dilation), _pair(self.stride))

    def _ceil_padding(self, shape: torch.Size) -> tuple[int, int, int, int]:
        extra = []
        for axis in (0, 1):
            kernel, stride, padding, dilation = (
                _pair(value)[axis] for value in (self.kernel_size, self.stride, self.padding, self.dilation)
            )
            size = shape[axis - 2]
            dense = size + 2 * padding - dilation * (kernel - 1)  # the length at stride 1
            last = -(-(dense - 1) // stride) * stride
            if last >= size + padding:  # max_pool2d drops a window that starts in the right padding
                last -= stride
            extra.append(max(0, last + 1 - dense))
        return 0, extra[1], 0, extra[0]


CLASSES: Classes = {nn.Conv2d: BlurConv2d, nn.MaxPool2d: BlurMaxPool2d}


@dataclass(frozen=True)
class BlurPool(Transform):
    """Anti-aliased strided convolutions and max-pools.

    Computes the same as Composer's `apply_blurpool`, except that a `ceil_mode` pool keeps its output size and a
    max-pool of stride 1, which does not subsample, is left unchanged.

    Only modules whose class is exactly `nn.Conv2d` or `nn.MaxPool2d` change. A subclass may have its own forward, so it
    is reported in `skipped`: also parametrized convolutions (spectral norm) and the results of WeightStandardization
    and SqueezeExcite, which are applied later. BlurPool is applied after Factorize, which skips blurred convolutions,
    and changes the first factor of a strided convolution. Calls of `F.conv2d` and `F.max_pool2d` are not detected.

    Attributes:
        replace_convs: whether to change convolutions with a stride above 1. Default True.
        replace_maxpools: whether to change max-pools with a stride above 1. Default True.
        blur_first: True blurs a convolution's input (cost: one depthwise 3×3). False, as in the paper, convolves at
            stride 1 and blurs the output, at stride² times the cost. Default True, as in Composer's recipes.
        min_channels: convolutions with fewer input channels are left unchanged. Integer ≥ 0. Default 16, which skips
            the first one: blurring the image itself loses resolution.

    Source: Zhang, "Making Convolutional Networks Shift-Invariant Again", 2019, arXiv:1904.11486.

    Example::

        >>> report = BlurPool().apply(model)  # a ResNet-18
        >>> len(report.changed)
        7
    """

    replace_convs: bool = True
    replace_maxpools: bool = True
    blur_first: bool = True
    min_channels: Natural = 16

    kind = "surgery"
    on_meta = True
    source = "Zhang 2019, arXiv:1904.11486"
    after = ("Factorize",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.replace_convs or self.replace_maxpools):
            raise PlanError(
                "BlurPool(replace_convs=False, replace_maxpools=False) replaces nothing. Set one of them to True."
            )

    def apply(self, model: nn.Module) -> Report:
        convs = f"Conv2d with a stride above 1 and at least {self.min_channels} input channels"
        parts = [convs] * self.replace_convs + ["MaxPool2d with a stride above 1"] * self.replace_maxpools
        return operate("BlurPool", model, self._judge, self._change, " and ".join(parts), wrapped=True)

    def _judge(self, module: nn.Module) -> Verdict | str:
        verdict = judge_class(module, CLASSES)
        if verdict is Verdict.DONE:
            return verdict
        if isinstance(module, nn.Conv2d):
            wanted = self.replace_convs and max(_pair(module.stride)) > 1
        else:
            wanted = self.replace_maxpools
        if not wanted:
            return Verdict.IGNORE
        return (self._obstacle(module) or verdict) if verdict is Verdict.CHANGE else verdict

    def _obstacle(self, module: nn.Module) -> str | None:
        if isinstance(module, nn.Conv2d) and module.in_channels < self.min_channels:
            return f"{module.in_channels} input channels, fewer than min_channels={self.min_channels}"
        if isinstance(module, nn.MaxPool2d) and max(_pair(module.stride)) == 1:
            return "stride 1 does not subsample"
        if isinstance(module, nn.MaxPool2d) and module.return_indices:
            return "return_indices=True: a blurred maximum has no single index"
        return None

    def _change(self, module: nn.Module) -> None:
        change_class(module, CLASSES)
        if isinstance(module, BlurConv2d):
            module.blur_first = self.blur_first


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
