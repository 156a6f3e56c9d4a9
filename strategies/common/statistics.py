"""Buffers pooled over all ranks: means, and for BatchNorm the variance of all ranks' samples together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...common.model_state import has_mean

Mean = Callable[[torch.Tensor], torch.Tensor]
"""Returns the mean of a tensor over the ranks; all of them must call it."""


def pool_buffers(values: Mapping[str, torch.Tensor], model: nn.Module, mean: Mean) -> dict[str, torch.Tensor]:
    """Return the floating-point and complex buffers in `values` pooled over all ranks: their means, and BatchNorm's
    `running_var` as one variance.

    Values that are equal on all ranks, as BatchNorm's with `sync_batchnorm`, do not change. Otherwise ranks normalize
    with the statistics of their own shards, so their running statistics differ. For N shards of equal size the full
    batch has (law of total variance)::

        mean = mean_r(mean_r)
        var  = mean_r(var_r) + var_r(mean_r)     # var_r over the N ranks as the population

    The mean of the variances alone is too small if the shards' means differ. The result equals that of one process on
    the full batches, with two exceptions, because only the running statistics are exchanged, once, and not those of
    each batch. First, a rank's variance is unbiased for its n values of a channel, by n / (n - 1), where the full batch
    would use N · n: a relative difference below 1 / n. Second, the second term uses the *running* means: it contains
    differences between ranks that last longer than 1 / momentum steps, as when ranks see different data, but little of
    the independent differences of each shuffled batch: a relative difference of about 1 / n_independent of one batch's
    values.

    Layers whose running variance is a mean of variances even in one process keep the mean: InstanceNorm, and those with
    a class variable `averages_variances` (GhostBatchNorm). `mean`, over the ranks, is called once, with float64: mean²
    - mean² in float32 would lose small variances.
    """
    chosen = {name: value for name, value in values.items() if has_mean(value)}
    if not chosen:
        return {}
    partners = {var: m for var, m in _batch_norms(model) if var in chosen and m in chosen}
    wide = {name: _reals(value.detach()).flatten().double() for name, value in chosen.items()}
    parts = [*wide.values(), *(wide[m].square() for m in partners.values())]
    whole = torch.split(mean(torch.cat(parts)), [part.numel() for part in parts])
    pooled = dict(zip(chosen, whole, strict=False))
    for (var, m), squares in zip(partners.items(), whole[len(chosen) :], strict=True):
        pooled[var] = pooled[var] + (squares - pooled[m].square()).clamp_min(0.0)
    return {name: _like(pooled[name], value) for name, value in chosen.items()}


def _reals(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _like(flat: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return torch.view_as_complex(flat.view(*value.shape, 2)).to(value.dtype)
    return flat.to(value.dtype).view(value.shape)


def _batch_norms(model: nn.Module) -> list[tuple[str, str]]:
    """Return the names of `running_var` and `running_mean` of each layer that keeps one variance of all its samples."""
    return [
        (f"{name}.running_var".lstrip("."), f"{name}.running_mean".lstrip("."))
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not getattr(module, "averages_variances", False)
    ]
