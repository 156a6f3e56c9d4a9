"""Parameter groups by patterns over parameter names, and those of layer-wise decay."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...common.checks import check_number
from ...common.errors import PlanError
from ...strategies import OptimizerFactory
from ...strategies.common.blocks import find_blocks
from .config import OptionalGroups

WRAPPED = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|_orig_mod)\.")
"""Parts of a parameter's name that wrappers of other libraries add."""


@dataclass
class GroupedFactory:
    """`factory`, called with one group per pattern, after those that match none. Factories get parameters without
    names, but every strategy trains those of the model it was given, under the same names."""

    factory: OptimizerFactory  # accepts groups
    groups: Mapping[str, Mapping[str, Any]]  # the optimizer's options by pattern
    model: nn.Module  # after surgery; a strategy may have sharded or wrapped it in place by then
    note: str = field(default="", init=False)  # after the call, the number of parameters in each group

    def __call__(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        names = {parameter: WRAPPED.sub("", name) for name, parameter in self.model.named_parameters()}
        matched: dict[str | None, list[nn.Parameter]] = {None: []} | {pattern: [] for pattern in self.groups}
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained:
            name = names[parameter]
            first = next((pattern for pattern in self.groups if fnmatchcase(name, pattern)), None)
            matched[first].append(parameter)
        for pattern in self.groups:
            if not matched[pattern] and not isinstance(self.groups, OptionalGroups):
                raise PlanError(self._why_empty(pattern, [names[parameter] for parameter in trained]))
        self.note = self._describe(matched)
        return self.factory(
            [{"params": chosen, **self._options(pattern)} for pattern, chosen in matched.items() if chosen]
        )

    def _options(self, pattern: str | None) -> Mapping[str, Any]:
        return {} if pattern is None else self.groups[pattern]

    def _why_empty(self, pattern: str, names: list[str]) -> str:
        taken = [name for name in names if fnmatchcase(name, pattern)]
        if taken:
            first = next(other for other in self.groups if fnmatchcase(taken[0], other))
            return (
                f"groups[{pattern!r}] is left without parameters: {first!r} comes before it and matches {taken[0]!r}. "
                "Put the more specific pattern first."
            )
        if any(fnmatchcase(name, pattern) for name, _ in self.model.named_parameters()):
            return f"groups[{pattern!r}] matches only parameters that do not require gradients. Leave it out."
        near = difflib.get_close_matches(pattern.strip("*").rstrip("."), names, n=3, cutoff=0.3) or names[-3:]
        return (
            f"groups[{pattern!r}] matches none of the {len(names)} trained parameters. Similar names: "
            f"{', '.join(near)}. Names are those of model.named_parameters() after surgery."
        )

    def _describe(self, matched: Mapping[str | None, list[nn.Parameter]]) -> str:
        parts = []
        for pattern, chosen in [*[*matched.items()][1:], (None, matched[None])]:
            named = ", ".join(f"{name}={value}" for name, value in self._options(pattern).items())
            name = "all others" if pattern is None else f"{pattern} ({named})"
            if chosen:
                parts.append(f"{name}: {sum(p.numel() for p in chosen):,} in {len(chosen)} tensor(s)")
        return f"Parameter groups: {'; '.join(parts)}."


def layerwise_decay(model: nn.Module, lr: float, factor: float = 0.75) -> dict[str, dict[str, Any]]:
    """Return parameter groups whose learning rates fall from the model's output to its input, for fine-tuning.

    In `pipeline.optimize("adamw", lr=lr, groups=layerwise_decay(model, lr))`, what follows the last block (the final
    norm, the head) has `lr`, the last block `lr · factor`, the one before it `lr · factor²`, and so on; what precedes
    the first block has the lowest. Blocks are the model's repeated composite modules in their order: the layers of a
    transformer, the residual blocks of a ResNet. A parameter between two blocks belongs to the earlier one. Parameters
    that do not require gradients have no group.

    A model without blocks, such as VGG or an `nn.Sequential` of layers, decays by layer: each module with a matrix or a
    kernel of its own begins one, to which the norms and biases up to the next belong. The last layer has `lr`.

    The order is that in which the modules are registered, which need not be that of the forward.

    Source: Clark et al., "ELECTRA", 2020, arXiv:2003.10555; Bao et al., "BEiT", 2022, arXiv:2106.08254. timm decays by
    blocks, too; where it knows none, by every 12 parameters.

    Args:
        model: has the names of the trained one; only names and shapes are read, so it may be on the meta device.
        lr: the learning rate of the last layers.
        factor: from each block to the one before it, in (0, 1]. Default 0.75, that of He et al. 2022,
            arXiv:2111.06377, for ViT-L; they use 0.65 for ViT-B.

    Raises:
        PlanError: for an invalid number, or a model without trained parameters, or with lazy layers.

    Example::

        >>> groups = layerwise_decay(model, lr=1e-3, factor=0.75)
        >>> pipeline = Pipeline(model).optimize("adamw", lr=1e-3, groups=groups)
    """
    check_number("layerwise_decay: lr", lr, PlanError, "[0, inf)")
    check_number("layerwise_decay: factor", factor, PlanError, "(0, 1]")
    if any(map(is_lazy, model.parameters())):
        raise PlanError(
            f"layerwise_decay: {type(model).__name__} has lazy layers, without shapes. Call it on an image first."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PlanError(
            f"layerwise_decay: no parameter of {type(model).__name__} is trained. Set requires_grad on those to train."
        )
    # Large layers, alone or inside a block, are units for sharding only.
    found = {module for module in find_blocks(model) if any(module.children())}
    names = [name for name, module in model.named_modules() if module in found]
    blocks = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    depths = _by_block(model, blocks) if blocks else _by_layer(model)
    last = len(blocks) + 1 if blocks else max(depths.values())
    return {pattern: {"lr": lr * factor ** (last - depth)} for pattern, depth in depths.items() if depth < last}


def _by_block(model: nn.Module, blocks: list[str]) -> dict[str, int]:
    """Return the depth of each pattern of trained parameters, from 1; what follows the last block is the deepest."""
    depths: dict[str, int] = {}
    begun = 0  # blocks whose parameters have begun
    for name in (name for name, parameter in model.named_parameters() if parameter.requires_grad):
        inside = next((number for number, block in enumerate(blocks) if name.startswith(f"{block}.")), None)
        begun = begun if inside is None else max(begun, inside + 1)
        pattern = name if inside is None else f"{blocks[inside]}.*"
        depths[pattern] = begun if inside is not None or begun < len(blocks) else begun + 1
    return depths


def _by_layer(model: nn.Module) -> dict[str, int]:
    depths: dict[str, int] = {}
    depth = 0
    for path, module in model.named_modules():
        own = dict(module.named_parameters(path, recurse=False))
        depth += any(each.dim() > 1 for each in own.values())
        whole = "" if any(module.children()) else path  # whose pattern has all of its parameters
        trained = [name for name, each in own.items() if each.requires_grad]
        depths |= dict.fromkeys([f"{path}.*"] if trained and whole else trained, max(depth, 1))
    return depths
