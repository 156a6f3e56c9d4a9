"""PatchDropout: train a vision transformer on a random part of each image's patches. Shapes: B batch, N tokens (prefix
tokens such as the class token, then patches), D features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .alibi import has_bias
from .base import FractionAboveZero, Report, Transform
from .common.surgery import Verdict, full_name, operate, patched

SLOTS = {
    "torchvision.models.vision_transformer.Encoder": "dropout",
    "timm.models.vision_transformer.VisionTransformer": "patch_drop",
    "timm.models.deit.VisionTransformerDistilled": "patch_drop",
    "transformers.models.vit.modeling_vit.ViTEmbeddings": "dropout",
    "transformers.models.deit.modeling_deit.DeiTEmbeddings": "dropout",
}
"""The attribute that holds what acts on all tokens between the position embedding and the first block, by class."""


class PatchDrop(nn.Dropout):
    """Keep `keep` of the patches of each image in training, drawn without replacement, and all `prefix` tokens; then
    the dropout that it was before."""

    keep: float
    prefix: int

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        patches = input.shape[1] - self.prefix
        draws = torch.randn(len(input), patches, device=input.device)  # as timm draws
        count = max(1, int(patches * self.keep + 1e-9))  # 100 * 0.29 is 28.999…
        kept = draws.argsort(1)[:, :count] + self.prefix
        chosen = input.gather(1, kept[:, :, None].expand(-1, -1, input.shape[2]))
        return super().forward(torch.cat([input[:, : self.prefix], chosen], 1))

    def extra_repr(self) -> str:
        return f"p={self.p}, keep={self.keep}, prefix={self.prefix}"


@dataclass(frozen=True)
class PatchDropout(Transform):
    """Train a vision transformer on a random part of each image's patches; evaluation uses all.

    After the position embedding, `keep` of the patches (rounded down, at least one) are drawn for each image, without
    replacement; class tokens and registers always stay. The blocks compute only those, so a step takes about `keep` of
    its time and memory. Kept tokens are not scaled, and a pretrained model can be fine-tuned with it, as in the paper.

    Supports ViT and DeiT of torchvision, timm and transformers; timm's own `patch_drop_rate` does the same. The
    number of tokens is fixed, so nothing is compiled twice. Draws are from the device's generator, as dropout's are: a
    resumed run draws the same, several ranks others than one. ALiBi is rejected: its distances need the full grid.

    Attributes:
        keep: fraction of the patches. Number in (0, 1]. Default 0.5, which halves FLOPs and memory on ImageNet in the
            paper.

    Source: Liu et al., "PatchDropout: Economizing Vision Transformers Using Patch Dropout", 2023, arXiv:2208.07220.

    Example::

        >>> report = PatchDropout(keep=0.5).apply(vit)  # a vision transformer
        >>> report.changed
        ('encoder.dropout',)
    """

    keep: FractionAboveZero = 0.5

    kind = "surgery"
    on_meta = True
    tried_by_tune = "surgery"
    source = "Liu et al. 2023, arXiv:2208.07220"
    excludes = ("ALiBi",)

    def apply(self, model: nn.Module) -> Report:
        prefixes = dict(_slots(model))

        def change(module: Any) -> None:
            module.p, module.inplace = getattr(module, "p", 0.0), False
            module.keep, module.prefix = self.keep, prefixes[id(module)]
            module.__class__ = PatchDrop

        looks_for = "ViT and DeiT of torchvision, timm and transformers"
        return operate("PatchDropout", model, partial(_judge, prefixes), change, looks_for)


def _slots(model: nn.Module) -> Iterator[tuple[int, int | str]]:
    """Yield the id of each ViT's slot, with the number of its prefix tokens, or why it must not drop patches."""
    for vit in model.modules():
        if full_name(vit) in SLOTS:
            prefix = int(getattr(vit, "num_prefix_tokens", 1 + hasattr(vit, "distillation_token")))
            biased = any(map(has_bias, vit.modules()))
            slot = getattr(vit, SLOTS[full_name(vit)])
            yield id(slot), "ALiBi needs the full grid of patches" if biased else prefix


def _judge(prefixes: Mapping[int, int | str], module: nn.Module) -> Verdict | str:
    if id(module) not in prefixes:
        return Verdict.IGNORE
    if isinstance(module, PatchDrop):
        return Verdict.DONE
    if type(module) not in (nn.Identity, nn.Dropout):
        return f"{type(module).__name__} may drop patches already"
    prefix = prefixes[id(module)]
    return prefix if isinstance(prefix, str) else patched(module) or Verdict.CHANGE
