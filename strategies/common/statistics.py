"""Buffers of all ranks as one: means, and for BatchNorm the variance of all ranks' samples together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Mean = Callable[[torch.Tensor], torch.Tensor]
"""The mean of a tensor over the ranks; all of them must call it."""


def pool_buffers(values: Mapping[str, torch.Tensor], model: nn.Module, mean: Mean) -> dict[str, torch.Tensor]:
    """Return floating-point buffers over all ranks: their means, and BatchNorm's `running_var` as one variance.

    Ranks normalise with the statistics of their own shards, so that their running statistics differ. Of N shards of
    equal size the whole has (law of total variance)::

        mean = mean_r(mean_r)
        var  = mean_r(var_r) + var_r(mean_r)     # var_r over the N ranks as the population

    The mean of the variances alone is too small wherever the shards' means differ. The result is that of one process
    on the whole batches, with two exceptions, because only the running statistics are exchanged, once, and not
    each batch's. A rank's variance is unbiased for its n values of a channel, n / (n - 1), and the whole would be for
    N · n: a share of less than 1 / n. And the second term is that of the *running* means: it has the differences
    between the ranks that last longer than 1 / momentum steps, as where ranks see different data, and little of those
    that each shuffled batch draws independently. These are missing: a share of about 1 / n_independent of one batch's
    values.

    Layers whose running variance is a mean of variances also in one process keep the mean: InstanceNorm, and those
    with a class variable `averages_variances` (GhostBatchNorm).

    Args:
        values: by the names of the model's buffers; others than floating-point ones are left out.
        model: names the BatchNorm layers.
        mean: over the ranks. Called once, with float64: mean² - mean² in float32 would lose small variances.
    """
    chosen = {name: value for name, value in values.items() if value.is_floating_point()}
    if not chosen:
        return {}
    partners = {var: m for var, m in _batch_norms(model) if var in chosen and m in chosen}
    wide = {name: value.detach().flatten().double() for name, value in chosen.items()}
    parts = [*wide.values(), *(wide[m].square() for m in partners.values())]
    whole = torch.split(mean(torch.cat(parts)), [part.numel() for part in parts])
    pooled = dict(zip(chosen, whole, strict=False))
    for (var, m), squares in zip(partners.items(), whole[len(chosen) :], strict=True):
        pooled[var] = pooled[var] + (squares - pooled[m].square()).clamp_min(0.0)
    return {name: pooled[name].to(value.dtype).view(value.shape) for name, value in chosen.items()}


def _batch_norms(model: nn.Module) -> list[tuple[str, str]]:
    """Return the names of `running_var` and `running_mean` of each layer whose variance is one of all its samples."""
    return [
        (f"{name}.running_var".lstrip("."), f"{name}.running_mean".lstrip("."))
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not getattr(module, "averages_variances", False)
    ]
