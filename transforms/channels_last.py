"""ChannelsLast: weights stored as NHWC, the layout in which tensor cores read convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..common.errors import PlanError
from ..common.rows import is_dtensor
from .base import Report, Transform, warn_nothing_changed


@dataclass(frozen=True)
class ChannelsLast(Transform):
    """Convert every 4-D parameter, and its gradient, to `torch.channels_last`, in place.

    Shapes, names and `Parameter` objects do not change. A convolution with such a weight produces channels-last
    activations whatever its input's layout, so inputs need no conversion.

    It is applied after surgery, which creates contiguous weights: Composer's BlurPool after its ChannelsLast silently
    reverts three weights of a ResNet-18. FSDP2 accepts only contiguous parameters: Drivetrain's strategies convert them
    back, and convert the images to channels-last instead. Sharded parameters are rejected.

    Source: PyTorch, "Channels Last Memory Format in PyTorch" (tutorial, V. Fedyunin).

    Example::

        >>> report = ChannelsLast().apply(model)
        >>> model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
        True
    """

    kind = "memory_format"
    on_meta = True
    tried_by_tune = "format"
    source = "PyTorch tutorial, Channels Last Memory Format"
    after = ("BlurPool",)

    def apply(self, model: nn.Module) -> Report:
        self._refuse_sharded(model)
        changed: list[str] = []
        skipped: list[tuple[str, str]] = []
        already = 0
        for name, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            if any(is_lazy(parameter) for parameter in own):
                skipped.append((name, "its parameters have no shape before the first forward"))
                continue
            images = [parameter for parameter in own if parameter.dim() == 4]
            moved = [_to_channels_last(parameter) for parameter in images]
            if any(moved):
                changed.append(name)
            elif images:
                already += 1
        notes = (f"{already} module(s) were already channels-last.",) if already else ()
        report = Report("ChannelsLast", tuple(changed), tuple(skipped), notes)
        if not changed and not already:
            warn_nothing_changed(report, "4-D parameters, such as a Conv2d's weight", model)
        return report

    def _refuse_sharded(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if is_dtensor(parameter):
                raise PlanError(
                    f"ChannelsLast cannot change {name!r}, which is sharded (DTensor), and FSDP2 does not shard "
                    "channels-last weights. Remove ChannelsLast, or use the strategy ddp."
                )


def _to_channels_last(parameter: nn.Parameter) -> bool:
    data = parameter.data.to(memory_format=torch.channels_last)
    # `is_contiguous(memory_format=...)` is true for both layouts of a 1×1 kernel; a convolution chooses by the strides.
    if data.stride() == parameter.stride():
        return False
    parameter.data = data
    if parameter.grad is not None:
        parameter.grad.data = parameter.grad.data.to(memory_format=torch.channels_last)
    return True
