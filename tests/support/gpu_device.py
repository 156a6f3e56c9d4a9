"""The device that the tests marked `gpu` are about, and the proof that it worked.

They are skipped where torch sees no CUDA device. With DRIVETRAIN_REHEARSE_GPU=1 they run on the CPU instead, less what
only CUDA can show: so their own code is known to run before a GPU is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

REHEARSED = os.environ.get("DRIVETRAIN_REHEARSE_GPU") == "1"
COUNT = torch.cuda.device_count() if torch.cuda.is_available() and not REHEARSED else 0
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not COUNT and not REHEARSED,
        reason="no CUDA device: torch.cuda.is_available() is False (DRIVETRAIN_REHEARSE_GPU=1 rehearses on the CPU)",
    ),
]
CUDA_ONLY = pytest.mark.skipif(not COUNT, reason="only CUDA can show it: there is no CUDA device")
TWO = pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA devices, and torch sees {COUNT}")


@dataclass(frozen=True)
class Device:
    """Where a test works.

    Attributes:
        name: `"cuda"`, or in a rehearsal `"cpu"`.
        real: whether it is a GPU, so that assertions about CUDA count.
    """

    name: str
    real: bool

    def holds(self, *tensors: torch.Tensor) -> None:
        assert tensors
        assert {tensor.device.type for tensor in tensors} == {self.name}


def allocations() -> int:
    """Return the allocations of this process on all CUDA devices, since it started."""
    return sum(
        torch.cuda.memory_stats(index).get("allocation.all.allocated", 0)
        for index in range(COUNT)
        if torch.cuda.is_initialized()
    )


@contextmanager
def at_work() -> Iterator[Device]:
    """Give the device; assert at the end that something was computed on it, in this process."""
    before = allocations()
    yield Device("cuda" if COUNT else "cpu", bool(COUNT))
    if COUNT:
        torch.cuda.synchronize()
        assert allocations() > before, "the test passed without the GPU"


def rank_work() -> int:
    """Return, in a rank, the most bytes that it has held on its GPU; 1 in a rehearsal, where there is none."""
    return torch.cuda.max_memory_allocated() if COUNT else 1
