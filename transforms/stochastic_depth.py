"""StochasticDepth: randomly drop the branches of residual blocks in training, deeper ones more often. Blocks with a
slot for a module that drops a branch get it there; torchvision's ResNet and ViT blocks change their class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from .base import FractionBelowOne, Report, Transform
from .common.surgery import Verdict, full_name, operate, patched

PLACES = ("stochastic_depth", "drop_path", "drop_path1", "drop_path2", "drop_path3")
"""Attributes in which torchvision's and timm's blocks keep the module that drops a branch."""

FLAGS = ("use_res_connect", "has_skip", "residual", "use_shortcut", "add_identity")
"""Attributes in which torchvision's and timm's blocks keep whether they have a shortcut."""

SHORTCUTS = {
    "timm.models.byobnet": ("shortcut", "identity"),
    "timm.models.regnet": ("downsample",),
    "timm.models.cpubone": ("shortcut",),
    "timm.models.lowformer": ("shortcut",),
}
"""Attributes in which blocks of these modules keep the shortcut itself; None: they have none."""

BLOCKS = {
    "torchvision.models.resnet.BasicBlock": "StochasticBasicBlock",
    "torchvision.models.resnet.Bottleneck": "StochasticBottleneck",
    "torchvision.models.vision_transformer.EncoderBlock": "StochasticEncoderBlock",
}
"""Blocks without such an attribute: where they are defined, and their class in residual_blocks.py."""


@dataclass(frozen=True)
class StochasticDepth(Transform):
    """Drop the branches of residual blocks at random in training, and scale kept ones by 1 / (1 - rate).

    The rates are those of Composer's `apply_stochastic_depth`, which supports only torchvision's Bottleneck and
    otherwise silently does nothing. Two differences are intentional:

    - Composer multiplies by (1 - rate) in evaluation; here training divides by it, as in torchvision and timm. Both are
      equivalent once the branch's last scale is multiplied by (1 - rate). Evaluation here is that of the plain model,
      so pretrained weights keep their function and trained ones export unchanged.
    - Composer's "block" breaks the compiled graph at every block, leaves parameters without gradients (DDP must search
      for them), and FSDP's ranks deadlock if one skips a layer that another gathers.

    "block" skips the branch of a ResNet block, as in the paper and Composer: it is not computed, its BatchNorm
    statistics do not change, and its parameters get gradients of 0, so that weight decay and momentum act on them in
    every step, as in the authors' code. In a compiled graph, with a hook on a layer of the branch (FSDP around single
    layers) or on its parameters (DeepSpeed), and with SyncBatchNorm, the branch is computed, multiplied by 0 and its
    statistics are restored: the same numbers, without the time saved. Eager, a step of ResNet-50 took 0.97 of the
    unmodified model's time, at 0.99 of Composer's speed (one CPU thread, 16 images of 64 pixels, torch 2.15, n = 7).

    In all other blocks, and with "sample", a branch is computed and multiplied by 0, and its statistics are updated.
    The draw for a skipped branch uses the CPU generator, whatever the model's device; ranks may draw differently. This
    aborts FairScale's ShardedDDP, which sends gradients as they arrive: a skipped branch changes their order.

    A ViT block has two branches; each is dropped independently, with the block's rate. Rates that the model was built
    with (torchvision's ConvNeXt has some) are replaced, with a note.

    Attributes:
        method: "block", the paper's, drops a branch for a device's batch, "sample" for each sample. Default "block".
        drop_rate: probability for the last block. Number in [0, 1). Default 0.2, as in Composer.
        distribution: "linear", the paper's, rises from drop_rate / blocks; "uniform" does not. Default "linear".

    Source: Huang et al., "Deep Networks with Stochastic Depth", 2016, arXiv:1603.09382.

    Example::

        >>> report = StochasticDepth(drop_rate=0.2).apply(model)
        >>> len(report.changed)
        8
    """

    method: Literal["block", "sample"] = "block"
    drop_rate: FractionBelowOne = 0.2
    distribution: Literal["linear", "uniform"] = "linear"

    kind = "surgery"
    on_meta = True
    tried_by_tune = "surgery"
    source = "Huang et al. 2016, arXiv:1603.09382"
    unsafe_with = ("fairscale",)

    def apply(self, model: nn.Module) -> Report:
        blocks = [module for module in model.modules() if _judge(module) is Verdict.CHANGE]
        rates = {id(block): self._rate(index, len(blocks)) for index, block in enumerate(blocks)}
        replaced = sum(any(_own_rate(block, place) for place in PLACES) for block in blocks)
        report = operate(
            "StochasticDepth", model, _judge, lambda block: self._change(block, rates[id(block)]),
            "residual blocks of torchvision's and timm's ResNets, ConvNeXts and ViTs",
        )  # fmt: skip
        if not replaced:
            return report
        note = f"Replaced the drop rate that {replaced} block(s) were built with."
        return replace(report, notes=(*report.notes, note))

    def _rate(self, index: int, count: int) -> float:
        return self.drop_rate * (index + 1) / count if self.distribution == "linear" else self.drop_rate

    def _change(self, block: nn.Module, rate: float) -> None:
        from .common import residual_blocks  # here, because it imports torchvision, which takes seconds

        mode, places = "batch" if self.method == "block" else "row", _places(block)
        if full_name(block) in BLOCKS:
            block.__class__ = getattr(residual_blocks, BLOCKS[full_name(block)])
            places.append("drop_branch")
        for place in places:
            setattr(block, place, residual_blocks.DropBranch(rate, mode).train(block.training))


def _judge(module: nn.Module) -> Verdict | str:
    if any(_is_ours(child) for child in module.children()):
        return Verdict.DONE
    if full_name(module) in BLOCKS:
        return patched(module) or Verdict.CHANGE
    if not _places(module):
        return Verdict.IGNORE
    # Some of these never use the attribute, and some (timm's MobileOne, RegNetZ, VoVNet) would drop all features.
    if not _has_shortcut(module):
        return "it has no shortcut"
    return Verdict.CHANGE


def _has_shortcut(block: nn.Module) -> bool:
    if any(getattr(block, flag, True) is False for flag in FLAGS) or getattr(block, "no_skip", False):
        return False
    names = SHORTCUTS.get(type(block).__module__, ())
    return all(getattr(block, name, block) is not None for name in names)


def _places(block: nn.Module) -> list[str]:
    empty = (type(None), nn.Identity)
    values = [(place, getattr(block, place)) for place in PLACES if hasattr(block, place)]
    return [place for place, one in values if isinstance(one, empty) or type(one).__name__ in _RATES]


_RATES = {"DropPath": "drop_prob", "StochasticDepth": "p"}
"""Class names of timm's and torchvision's branch-dropping modules, and the attribute with their rate."""


def _own_rate(block: nn.Module, place: str) -> bool:
    value = getattr(block, place, None)
    return bool(getattr(value, _RATES.get(type(value).__name__, ""), 0.0))


def _is_ours(module: nn.Module) -> bool:
    return full_name(module).endswith("transforms.common.residual_blocks.DropBranch")
