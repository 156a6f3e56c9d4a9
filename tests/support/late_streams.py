"""Streams of a GPU that is not there, which do everything as late as their rules allow, or as early.

An operation of a stream runs when something waits for it, and its result is wrong until then. So a missing wait, memory
that is used again too early, and a buffer that is written before its copy is done show as wrong numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WRONG = 77
"""The content of memory before its operation has run, and after it was freed."""


@dataclass
class Stream:
    """A queue of operations, in order."""

    queue: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0

    def run(self, until: int | None = None) -> None:
        until = len(self.queue) if until is None else until
        while self.done < until:
            self.done += 1
            self.queue[self.done - 1]()


@dataclass
class Event:
    """The end of what a stream has queued so far."""

    stream: Stream
    at: int

    def finish(self) -> None:
        self.stream.run(self.at)


class _Queued(TorchDispatchMode):
    """Queues each operation on tensors of the device; those of the host run at once."""

    def __init__(self, streams: LateStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(map(self._streams.is_on_device, tensors)) or func.is_view:
            return result
        in_place = any(result is tensor for tensor in tensors)
        target = self._streams.keep(result)

        def run() -> None:
            value = func(*args, **kwargs)
            if not in_place:
                target.copy_(value)

        result.fill_(WRONG)
        self._streams.copies.queue.append(run)
        return result


class LateStreams:
    """In the place of `loaders.device.CudaStreams`; see there. `finished` counts how often the host has waited,
    `current` the open blocks that make the device the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.copies, self.computing = device, Stream(), Stream()
        self.finished, self.current = 0, 0
        self._kept: dict[int, torch.Tensor] = {}
        self._recorded: set[int] = set()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note memory of the device; return another view of it, which outlives the tensor."""
        alias = tensor.data  # which, unlike a view, does not hold the tensor
        return self._kept.setdefault(_memory(tensor), alias) if tensor.numel() else alias

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) in self._kept

    @contextmanager
    def current_device(self) -> Iterator[None]:
        self.current += 1
        yield
        self.current -= 1

    @contextmanager
    def copying(self) -> Iterator[None]:
        with self.current_device(), _Queued(self):
            yield

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, WRONG, dtype=dtype)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.current, "a copy while another device is current"
        with torch.utils._python_dispatch._disable_current_modes():
            result = torch.empty_like(tensor).fill_(WRONG)
            target = self.keep(result)
        self.copies.queue.append(lambda: target.copy_(tensor))
        return result

    def record(self) -> Event:
        return Event(self.copies, len(self.copies.queue))

    def hand_over(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        self.computing.queue.append(event.finish)
        self._recorded.update(map(_memory, tensors))

    def finish(self, event: Event) -> None:
        self.finished += 1
        event.finish()

    def compute(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Queue a read of `tensor`; the list gets its value when the computing stream runs.

        The tensor may be gone by then: then the next copy may use its memory, unless `hand_over` has named it.
        """
        seen, alias = list[torch.Tensor](), tensor.data
        if _memory(tensor) not in self._recorded:
            weakref.finalize(tensor, self.copies.queue.append, lambda: alias.fill_(WRONG))
        self.computing.queue.append(lambda: seen.append(alias.clone()))
        return seen


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
