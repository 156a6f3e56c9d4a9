"""The memory of batches: on the host, reused once nobody references the batch; and on a CUDA device, to which they are
copied on a separate stream, one batch ahead, for which only the compute stream waits."""

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.errors import DataError
from ..common.transfer import to_device
from .options import LoaderOptions

Batch = tuple[Any, ...]


class CudaStreams:
    """What `DeviceFeed` needs from CUDA. No call changes the process's current device or current streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return pinned host memory; torch reuses it once it is free and its copies are done."""
        with self.current_device():
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=prod(shape) > 0)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.device)

    def record(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def hand_over(self, event: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Make the caller's current stream wait for `event` before it uses `tensors`, allocated on the copy stream.
        Their memory is not reused for copies before the work queued on that stream by then is done."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)

    def finish(self, event: Any) -> None:
        event.synchronize()


class _Sent(NamedTuple):
    """A batch being copied: its tensors are complete after `event`."""

    batch: Batch
    event: Any


class DeviceFeed:
    """Turns host batches into batches on a CUDA device; `dtype` is what bytes are normalized to, None keeps them."""

    def __init__(
        self, device: torch.device, mean: Sequence[float] = (), std: Sequence[float] = (),
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._device, self._mean, self._std, self._dtype = device, mean, std, dtype

    @cached_property
    def streams(self) -> CudaStreams:
        return CudaStreams(self._device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return self.streams.pinned(shape, dtype)
        except RuntimeError as error:
            size = prod(shape) * dtype.itemsize / 1e6
            raise DataError(
                f"A batch of {size:,.0f} MB cannot be pinned in memory for {self._device}: {error}. Use a smaller "
                "batch_size or image_size, or batches_ahead=1."
            ) from error

    def deliver(
        self, batches: Generator[Batch, None, None], ready: Callable[[], bool] = lambda: True
    ) -> Iterator[Batch]:
        """Yield the batches on the device, in order; an exception is raised after those before it. If `ready` (the next
        batch is available without waiting), its copy starts before the previous batch is yielded."""
        sent: deque[_Sent | Exception] = deque()
        try:
            while True:
                if not sent:
                    self._take(batches, sent)
                if not sent:
                    return
                if isinstance(sent[0], _Sent) and ready():
                    self._take(batches, sent)
                # Not in a local variable, which would keep the batch's memory alive while it is in use.
                yield self._hand_over(sent.popleft())
        finally:
            batches.close()
            for one in sent:
                if isinstance(one, _Sent):
                    self.streams.finish(one.event)

    def _take(self, batches: Iterator[Batch], sent: deque[_Sent | Exception]) -> None:
        try:
            batch = next(batches, None)
            if batch is not None:
                sent.append(self._send(batch))
        except Exception as error:  # of a worker or a copy; raised in its place in the order
            sent.append(error)

    def _send(self, batch: Batch) -> _Sent:
        with self.streams.copying():
            images, *further = (_mapped(self.streams.send, value) for value in batch)
            return _Sent((_mapped(self._normalized, images), *further), self.streams.record())

    def _normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize in one kernel: it reads bytes, computes in float32, and writes `dtype`."""
        if self._dtype is None:
            return images
        factor, summand = self._line
        return torch.addcmul(summand, images, factor, out=torch.empty_like(images, dtype=self._dtype))

    @cached_property
    def _line(self) -> torch.Tensor:
        """(2, 1, C, 1, 1) on the device: factor and summand for pixels 0–255."""
        mean, std = (torch.from_numpy(np.array(each, dtype=np.float64)) for each in (self._mean, self._std))
        line = torch.stack([1 / (255 * std), -mean / std]).float()
        return self.streams.send(line.view(2, 1, -1, 1, 1))

    def _hand_over(self, sent: _Sent | Exception) -> Batch:
        if isinstance(sent, Exception):
            raise sent
        tensors = list[torch.Tensor]()
        _mapped(tensors.append, sent.batch)
        self.streams.hand_over(sent.event, tensors)
        return sent.batch


def _mapped(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the value with `function` applied to its tensors, also to those in a tuple or list."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(function, each) for each in value)
    return value


def feed_of(device: torch.device, settings: LoaderOptions, depth: int = 8) -> DeviceFeed | None:
    """Return what copies a loader's bytes to a GPU, and normalizes those of 8 bits there; None for the CPU."""
    if device.type == "cpu":
        return None
    dtype = None if settings.dtype == torch.uint8 or depth == 16 else settings.dtype
    return DeviceFeed(device, settings.mean, settings.std, dtype)


def _references(buffers: list[NDArray[np.uint8]]) -> list[int]:
    """Return each buffer's reference count, including this list and this call."""
    return [sys.getrefcount(buffer) for buffer in buffers]


# The count for an unused buffer. Measured, because it differs between Python versions.
_UNUSED = _references([np.empty(1, dtype=np.uint8)])[0]


class Buffers:
    """Allocate tensors in memory that is reused once nobody references it; at most `keep` buffers. The system zeroes
    large allocations page by page: for 64 float32 images of 224 pixels a third of decoding's time."""

    def __init__(self, keep: int) -> None:
        self._keep, self._buffers = keep, list[NDArray[np.uint8]]()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self._take(size)).view(dtype).view(shape)

    def _take(self, size: int) -> NDArray[np.uint8]:
        for place, count in enumerate(_references(self._buffers)):
            # A tensor of `torch.from_numpy`, and any view of it, references its array.
            if count == _UNUSED and len(self._buffers[place]) == size:
                return self._buffers[place]
        fresh: NDArray[np.uint8] = np.empty(size, dtype=np.uint8)
        self._buffers = [*self._buffers, fresh][-self._keep :]
        return fresh

    def clear(self) -> None:
        self._buffers = []
