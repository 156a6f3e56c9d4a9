"""What BatchNorm computes when a batch is split over ranks and microbatches: for the plan, and for a run's notes."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .config import DistributedConfig
from .cuda_settings import uses_gpu


def batch_norms(model: nn.Module) -> int:
    """Return the number of layers whose statistics, in training, are those of the batch they are called with.

    GhostBatchNorm, whose statistics are those of small groups in any case, does not count.
    """
    return sum(
        isinstance(module, _BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and not getattr(module, "averages_variances", False)
        for module in model.modules()
    )


def caution(how: DistributedConfig, batch_size: int, model: nn.Module | None) -> str:
    """Return a caution about BatchNorm if a batch is split and its statistics would be those of a part; else "".

    Args:
        how: the options of `distribute`.
        batch_size: global batch size, in images.
        model: before anything has wrapped it; None if it has not been built yet.
    """
    parts = how.ranks * how.accumulate
    copies = how.name == "dp" and uses_gpu(how)  # one process, but possibly several GPUs
    if how.sync_batchnorm or (parts == 1 and not copies):
        return ""
    layers = None if model is None else batch_norms(model)
    if layers == 0:
        return ""
    which = "BatchNorm, if the model has any," if layers is None else f"BatchNorm ({layers} layers)"
    part = "one GPU's images" if copies else f"each microbatch of {batch_size // parts} images"
    return (
        f"{which} uses the statistics of {part}, not of the batch of {batch_size}, so results differ from one device "
        f"without accumulate. {_remedy(how, copies=copies)}"
    )


def _remedy(how: DistributedConfig, *, copies: bool) -> str:
    if how.accumulate > 1:
        together = ", on several ranks with sync_batchnorm=True" if how.ranks > 1 else ""
        return f"GroupNorm does not depend on the split; nor does accumulate=1{together}"
    return f"{'ddp with ' if copies else ''}sync_batchnorm=True makes them equal"
