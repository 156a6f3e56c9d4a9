"""Numbers on their way from the device to the host, for which neither waits."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """A small tensor's values, copied to the host behind the work that its device has queued so far.

    On CUDA the copy goes to pinned memory and returns at once; `values` waits for it, `arrived` does not. On the
    CPU the values are there at once. What is written into the tensor later does not change them.

    Args:
        tensor: of any shape and device.
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
        # The copy is queued on the stream of the tensor's device. Without it, `record` takes that of the current
        # device, which may be another: the event would be over before the copy.
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def arrived(self) -> bool:
        """Whether `values` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def values(self) -> Any:
        """The values as Python numbers: one for a tensor `()`, else (nested) lists; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
