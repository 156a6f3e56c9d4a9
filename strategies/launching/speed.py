"""How fast the ranks of a group exchange tensors."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_WARM_UP = 2
_SECONDS = 2.0  # for one size
_REPEATS = (3, 30)  # at least and at most


@dataclass(frozen=True)
class AllReduce:
    """What all-reduces of one size took."""

    size: int
    ranks: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each rank sends, in a ring and in the median time: `2 (n - 1) / n` times the size.
        nccl-tests names it "busbw"; unlike the size by the time, it does not depend on the number of ranks."""
        return 2 * (self.ranks - 1) / self.ranks * self.size / self.median


def all_reduce_speed(size: int, device: torch.device) -> AllReduce:
    """Measure all-reduces of `size` bytes (a multiple of 4) in the default group; all ranks must call it. It takes
    about two seconds at most, unless three repetitions take longer."""
    values = torch.zeros(max(size // 4, 1), device=device)
    for _ in range(_WARM_UP):
        _timed(values)
    first = _slowest([_timed(values)], device)[0]
    fewest, most = _REPEATS
    repeats = min(max(int(_SECONDS / max(first, 1e-9)), fewest), most)
    seconds = _slowest([_timed(values) for _ in range(repeats)], device)
    return AllReduce(values.nbytes, dist.get_world_size(), tuple(seconds))


def _timed(values: torch.Tensor) -> float:
    finish = torch.cuda.synchronize if values.is_cuda else lambda _: None
    finish(values.device)
    start = time.perf_counter()
    dist.all_reduce(values)
    finish(values.device)
    return time.perf_counter() - start


def _slowest(seconds: list[float], device: torch.device) -> list[float]:
    times = torch.tensor(seconds, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(each) for each in times.tolist()]
