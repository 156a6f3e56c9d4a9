"""Asynchronous copies of values from the device to the host."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """The values of a small tensor, copied to the host after the work already queued on its device.

    On CUDA the copy to pinned memory is asynchronous: `values` waits for it, `arrived` does not. On the CPU it is
    immediate. Later writes to the tensor do not change the values.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # The copy is queued on the stream of the tensor's device. By default, `record` uses that of the current device,
        # which may be another one: the event could complete before the copy.
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def arrived(self) -> bool:
        """Whether `values` would return immediately."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def values(self) -> Any:
        """Wait for the copy, and return the values as `Tensor.tolist` does."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
