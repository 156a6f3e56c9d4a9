"""The loss of each sample, from a loss that returns their mean."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..label_smoothing import SmoothedLoss

PerSample = Callable[..., Tensor]


def unreduced(loss: Any) -> PerSample | None:
    """Return the same loss with one value per sample, or several, instead of their mean; None for a loss that has no
    attribute or argument `reduction`, as all of torch's have."""
    if isinstance(loss, SmoothedLoss):
        base = unreduced(loss.base)
        return None if base is None else dataclasses.replace(loss, base=base)
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return None
        each: Any = copy.copy(loss)
        each.reduction = "none"
        return each  # type: ignore[no-any-return]
    return functools.partial(loss, reduction="none") if _takes_reduction(loss) else None


def _takes_reduction(loss: Callable[..., Any]) -> bool:
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a callable implemented in C without a signature
        return False
