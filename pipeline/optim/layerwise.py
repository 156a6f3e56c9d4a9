"""Layer-wise decay of the learning rate, as parameter groups."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...common.checks import check_number
from ...common.errors import PlanError
from ...strategies.common.blocks import find_blocks


def layerwise_decay(model: nn.Module, lr: float, factor: float = 0.75) -> dict[str, dict[str, Any]]:
    """Return parameter groups whose learning rates fall from the model's output to its input, for fine-tuning.

    In `pipeline.optimize("adamw", lr=lr, groups=layerwise_decay(model, lr))`, what follows the last block (the final
    norm, the head) has `lr`, the last block `lr · factor`, the one before it `lr · factor²`, and so on; what precedes
    the first block has the lowest. Blocks are the model's repeated composite modules in their order: the layers of a
    transformer, the residual blocks of a ResNet. A parameter between two blocks belongs to the earlier one. Parameters
    that do not require gradients have no group.

    Source: Clark et al., "ELECTRA", 2020, arXiv:2003.10555; Bao et al., "BEiT", 2022, arXiv:2106.08254.

    Args:
        model: has the names of the trained one; only names are read, so it may be on the meta device.
        lr: the learning rate of the last layers.
        factor: from each block to the one before it, in (0, 1]. Default 0.75, that of He et al. 2022,
            arXiv:2111.06377, for ViT-L; they use 0.65 for ViT-B.

    Raises:
        PlanError: for an invalid number, or a model without blocks.

    Example::

        >>> groups = layerwise_decay(model, lr=1e-3, factor=0.75)
        >>> pipeline = Pipeline(model).optimize("adamw", lr=1e-3, groups=groups)
    """
    check_number("layerwise_decay: lr", lr, PlanError, "[0, inf)")
    check_number("layerwise_decay: factor", factor, PlanError, "(0, 1]")
    found = set(find_blocks(model))
    names = [name for name, module in model.named_modules() if module in found]
    # Large layers inside a block are units for sharding only.
    blocks = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    if not blocks:
        raise PlanError(
            f"layerwise_decay: {type(model).__name__} has no blocks, modules of the same class in a row. Write the "
            "groups by hand: groups={'stem.*': {'lr': …}, …}."
        )
    groups: dict[str, dict[str, Any]] = {}
    begun = 0  # blocks whose parameters have begun
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name in trained:
        inside = next((number for number, block in enumerate(blocks) if name.startswith(f"{block}.")), None)
        begun = begun if inside is None else max(begun, inside + 1)
        pattern = name if inside is None else f"{blocks[inside]}.*"
        if inside is not None or begun < len(blocks):
            groups[pattern] = {"lr": lr * factor ** (len(blocks) + 1 - begun)}
    return groups
