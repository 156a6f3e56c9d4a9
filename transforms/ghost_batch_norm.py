"""GhostBatchNorm: batch statistics over small groups of samples, independent of the batch size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Positive, Report, Transform
from .common.surgery import Classes, Verdict, change_class, judge_class, operate


class _GhostBatchNorm(nn.modules.batchnorm._BatchNorm):
    ghost_batch_size: int = 32
    averages_variances = True  # its running variance is the mean of the groups', and across ranks of theirs

    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)  # evaluation uses running statistics, the same for every group
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        groups = max(1, -(-input.shape[0] // self.ghost_batch_size))
        return torch.cat([self._normalize(group, groups) for group in input.tensor_split(groups)])

    def _normalize(self, group: Tensor, groups: int) -> Tensor:
        """Normalize one group by its own statistics, which move the running ones 1/groups as far as a batch."""
        tracks = self.training and self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum / groups
        mean, variance = (self.running_mean, self.running_var) if tracks else (None, None)
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the running statistics are the cumulative mean over all groups
                if group.device.type != "cpu":
                    return self._accumulate(group)
                momentum = 1.0 / float(self.num_batches_tracked)
        return F.batch_norm(group, mean, variance, self.weight, self.bias, True, momentum, self.eps)

    def _accumulate(self, group: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = F.batch_norm(group, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            share = 1.0 / self.num_batches_tracked
            for one, new in ((self.running_mean, mean), (self.running_var, variance)):
                one.lerp_(new, share.to(one.dtype))
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_batch_size={self.ghost_batch_size}"  # type: ignore[no-untyped-call]


class GhostBatchNorm1d(_GhostBatchNorm, nn.BatchNorm1d): ...


class GhostBatchNorm2d(_GhostBatchNorm, nn.BatchNorm2d): ...


class GhostBatchNorm3d(_GhostBatchNorm, nn.BatchNorm3d): ...


CLASSES: Classes = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


@dataclass(frozen=True)
class GhostBatchNorm(Transform):
    """Batch normalization over groups of at most `ghost_batch_size` samples of each device's batch.

    In training it computes the same as Composer's `apply_ghost_batchnorm`, if the groups of a batch can be equal. If
    not, their sizes differ by one; Composer's last group may be much smaller, even a single sample, which has no
    variance in `nn.BatchNorm1d`. Two cases in which Composer raises work here: a batch smaller than the ghost size is
    one group, in evaluation too, and `momentum=None` (cumulative statistics) averages over all groups. The names in the
    state dict do not change.

    Only plain `nn.BatchNorm1d`, `2d` and `3d` change. `nn.SyncBatchNorm`, which has the opposite purpose, and other
    subclasses are reported in `skipped`. A later `convert_sync_batchnorm` reverts the change.

    Attributes:
        ghost_batch_size: maximum samples in a group; the fewest groups, as equal as possible. Integer ≥ 1. Default 32,
            as in Composer.

    Source: Hoffer et al., "Train longer, generalize better", 2017, arXiv:1705.08741.

    Example::

        >>> report = GhostBatchNorm(ghost_batch_size=16).apply(model)
        >>> len(report.changed)
        20
    """

    ghost_batch_size: Positive = 32

    kind = "surgery"
    on_meta = True
    groups_statistics = True
    source = "Hoffer et al. 2017, arXiv:1705.08741"

    def apply(self, model: nn.Module) -> Report:
        return operate("GhostBatchNorm", model, _judge, self._change, "BatchNorm1d, 2d and 3d")

    def _change(self, module: nn.Module) -> None:
        change_class(module, CLASSES)
        module.ghost_batch_size = self.ghost_batch_size  # type: ignore[assignment]


def _judge(module: nn.Module) -> Verdict | str:
    if isinstance(module, nn.SyncBatchNorm):
        return "SyncBatchNorm computes statistics over all devices, the opposite of a ghost batch"
    return judge_class(module, CLASSES)
