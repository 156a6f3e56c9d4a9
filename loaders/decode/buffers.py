"""Memory for batches, reused once the batch in it is no longer referenced."""

from __future__ import annotations

import sys

import numpy as np
import torch
from numpy.typing import NDArray


def _references(buffers: list[NDArray[np.uint8]]) -> list[int]:
    """Return each buffer's reference count, including this list and this call."""
    return [sys.getrefcount(buffer) for buffer in buffers]


# The count for an unused buffer. Measured, because it differs between Python versions.
_UNUSED = _references([np.empty(1, dtype=np.uint8)])[0]


class Buffers:
    """Allocate tensors in memory that is reused once nobody references it; at most `keep` buffers are kept.

    The system provides large allocations page by page, each zeroed first: for a batch of 64 float32 images of 224
    pixels that takes a third as long as decoding it. A tensor made by `torch.from_numpy` keeps its array alive as long
    as it, or any view of it, exists; so an array that only this list references is free.
    """

    def __init__(self, keep: int) -> None:
        self._keep, self._buffers = keep, list[NDArray[np.uint8]]()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a CPU tensor of that shape with undefined values."""
        size = int(np.prod(shape)) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self._take(size)).view(dtype).view(shape)

    def _take(self, size: int) -> NDArray[np.uint8]:
        for place, count in enumerate(_references(self._buffers)):
            if count == _UNUSED and len(self._buffers[place]) == size:
                return self._buffers[place]
        fresh: NDArray[np.uint8] = np.empty(size, dtype=np.uint8)
        self._buffers = [*self._buffers, fresh][-self._keep :]
        return fresh

    def clear(self) -> None:
        """Release the unused buffers, and forget the others."""
        self._buffers = []
