"""WeightStandardization: standardize each output channel's weights to mean 0 and variance 1 in every forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .base import Natural, Report, State, Transform
from .blurpool import BlurConv2d
from .common.surgery import Classes, Verdict, change_class, computed, judge_class, operate, places


def standardize(weight: Tensor) -> Tensor:
    """Return (weight - mean) / sqrt(variance + 1e-10), with the mean and variance of each output channel; half
    precision is computed in float32, where 1e-10 is not 0."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, dim=tuple(range(1, wide.dim())), correction=0, keepdim=True)
    return ((wide - mean) / torch.sqrt(variance + 1e-10)).to(weight.dtype)


class _Standardized(nn.modules.conv._ConvNd):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, standardize(weight), bias)


class StandardizedConv1d(_Standardized, nn.Conv1d): ...


class StandardizedConv2d(_Standardized, nn.Conv2d): ...


class StandardizedConv3d(_Standardized, nn.Conv3d): ...


class StandardizedBlurConv2d(_Standardized, BlurConv2d): ...


CLASSES: Classes = {
    nn.Conv1d: StandardizedConv1d,
    nn.Conv2d: StandardizedConv2d,
    nn.Conv3d: StandardizedConv3d,
    BlurConv2d: StandardizedBlurConv2d,
}


@dataclass(frozen=True)
class WeightStandardization(Transform):
    """Standardize the weights of convolutions per output channel.

    Same numbers as Composer's `apply_weight_standardization`, whose models cannot be saved with `torch.save` and have
    different parameter names; here both are preserved. A convolution with one weight per output channel (a 1×1
    depthwise one) would output only 0, and is left unchanged.

    It is applied after BlurPool and Factorize, which skip standardized convolutions. Both factors of a factorized
    convolution are standardized, as in Composer. Plain weights load before and after, because they are what the forward
    standardizes. `to_plain` returns the standardized weights, with which a plain model has the same output.

    Attributes:
        n_last_layers_ignore: number of convolutions at the end, in registration order, that are left unchanged. Integer
            ≥ 0. Default 0, as in Composer, which uses the order of execution if it can trace the model.

    Source: Qiao et al., "Weight Standardization", 2019, arXiv:1903.10520.

    Example::

        >>> report = WeightStandardization().apply(model)
        >>> len(report.changed)
        20
    """

    n_last_layers_ignore: Natural = 0

    kind = "surgery"
    on_meta = True
    source = "Qiao et al. 2019, arXiv:1903.10520"
    after = ("BlurPool", "Factorize")

    def apply(self, model: nn.Module) -> Report:
        convs = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
        last = {id(conv) for conv in convs[max(0, len(convs) - self.n_last_layers_ignore) :]}

        def judge(module: nn.Module) -> Verdict | str:
            verdict = judge_class(module, CLASSES)
            if verdict in (Verdict.IGNORE, Verdict.DONE):
                return verdict
            if id(module) in last:
                return f"among the last n_last_layers_ignore={self.n_last_layers_ignore}"
            if verdict is Verdict.CHANGE and (reason := computed(module)):
                return reason
            if verdict is Verdict.CHANGE and module.get_parameter("weight")[0].numel() == 1:
                return "it has one weight per output channel, which would become 0"
            return verdict

        change = partial(change_class, classes=CLASSES)
        return operate("WeightStandardization", model, judge, change, "Conv1d, Conv2d and Conv3d")

    def to_plain(self, state: State, model: nn.Module) -> State:
        plain = dict(state)
        for place in places(model, _Standardized):
            if f"{place}weight" in plain:
                plain[f"{place}weight"] = standardize(plain[f"{place}weight"])
        return plain
