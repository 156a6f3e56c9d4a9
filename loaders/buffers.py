"""Memory of batches, used again once nobody holds the batch that was in it."""

from __future__ import annotations

import sys

import numpy as np
import torch
from numpy.typing import NDArray


def _references(buffers: list[NDArray[np.uint8]]) -> list[int]:
    """How often each is referred to, this list and this count included."""
    return [sys.getrefcount(buffer) for buffer in buffers]


# Of a buffer that nobody uses. Counted, because it differs between Python's versions.
_UNUSED = _references([np.empty(1, dtype=np.uint8)])[0]


class Buffers:
    """Gives tensors of fresh or reused memory.

    The system hands out large memory page by page, each zeroed first: for a batch of 64 images of 224 pixels in
    float32 that takes as long as a third of its decoding. A tensor made by `torch.from_numpy` holds its array as
    long as it, or any view of it, lives; so an array that only this list holds is free.

    Args:
        keep: buffers to keep at most; more are given back to the system.
    """

    def __init__(self, keep: int) -> None:
        self._keep, self._buffers = keep, list[NDArray[np.uint8]]()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape with undefined values, on the CPU."""
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
        """Gives back what is not in use now, and forgets the rest."""
        self._buffers = []
