"""GatedLinearUnits: a transformer MLP gated by a second linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .base import Report, State, Transform
from .common.surgery import Classes, Verdict, change_class, judge_class, operate, places
from .factorize import FactorizedLinear


class GatedMlp(nn.Module):
    """timm's `Mlp`, with `value` multiplying the activation."""

    fc1: nn.Module
    act: nn.Module
    drop1: nn.Module
    norm: nn.Module
    fc2: nn.Module
    drop2: nn.Module
    value: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop1(self.act(self.fc1(x)) * self.value(x))
        return self.drop2(self.fc2(self.norm(hidden)))  # type: ignore[no-any-return]


class GatedSequentialMlp(nn.Sequential):
    """torchvision's `MLP` and `MLPBlock` (linear, activation, dropout, linear, dropout), with `value`."""

    value: nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        first, activation, drop, second, drop_again = list(self)[:5]  # the sixth is `value`
        hidden = drop(activation(first(input)) * self.value(input))
        return drop_again(second(hidden))  # type: ignore[no-any-return]


CLASSES: Classes = {
    "timm.layers.mlp.Mlp": GatedMlp,
    "torchvision.ops.misc.MLP": GatedSequentialMlp,
    "torchvision.models.vision_transformer.MLPBlock": GatedSequentialMlp,
}


@dataclass(frozen=True)
class GatedLinearUnits(Transform):
    """Turn act(W x) in the MLPs of vision transformers into act(W x) · (V x).

    Supports timm's `Mlp` (ViT, ConvNeXt, Swin, …) and torchvision's `MLP` and `MLPBlock` (ViT, Swin). The MLP gets 50 %
    more parameters. Composer's supports only Hugging Face's BERT and starts from new random weights. Here the formula
    is the same, but V x + b starts as 1: the model's function does not change, pretrained weights remain useful, and V
    is trained from there. W keeps its bias. It is applied after Factorize, which cannot factorize zeros.

    `name.value.weight` and `name.value.bias` are new; all other names are unchanged. A plain model cannot express the
    product: `to_plain` keeps these entries, and a plain model loads the others with `load_state_dict(strict=False)`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.

    Example::

        >>> report = GatedLinearUnits().apply(vit)
        >>> len(report.changed)
        2
    """

    kind = "surgery"
    source = "Shazeer 2020, arXiv:2002.05202"
    renames = True
    after = ("Factorize",)

    def apply(self, model: nn.Module) -> Report:
        looks_for = "the MLP of timm's and torchvision's transformer blocks"
        return operate("GatedLinearUnits", model, _judge, _change, looks_for)

    def from_plain(self, state: State, model: nn.Module) -> State:
        changed = dict(state)
        own = model.state_dict()
        for place in places(model, (GatedMlp, GatedSequentialMlp)):
            for name, number in ((f"{place}value.weight", 0.0), (f"{place}value.bias", 1.0)):
                changed.setdefault(name, torch.full_like(own[name], number))
        return changed


def _judge(module: nn.Module) -> Verdict | str:
    verdict = judge_class(module, CLASSES)
    if verdict in (Verdict.IGNORE, Verdict.DONE):
        return verdict
    if isinstance(module, nn.Sequential) and len(module) != 5:
        return "its layers are not linear, activation, dropout, linear, dropout"
    if type(_first(module)) not in (nn.Linear, FactorizedLinear):
        return f"its first layer is a {type(_first(module)).__name__}, not an nn.Linear"
    return verdict


def _first(module: nn.Module) -> nn.Module:
    return module[0] if isinstance(module, nn.Sequential) else module.get_submodule("fc1")


def _change(module: nn.Module) -> None:
    first = _first(module)
    assert isinstance(first, nn.Linear | FactorizedLinear)
    like = next(first.parameters())
    value = nn.Linear(first.in_features, first.out_features, device=like.device, dtype=like.dtype)
    nn.init.zeros_(value.weight)
    nn.init.ones_(value.bias)
    change_class(module, CLASSES)
    module.add_module("value", value.train(module.training))
