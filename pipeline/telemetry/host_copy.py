"""Asynchronous copies of values from the device to the host."""

from typing import Any

import torch


class HostCopy:
    """A small tensor's values, copied to the host after the work already queued on its device; later writes do not
    change them. On CUDA the copy to pinned memory is asynchronous: `values` waits for it, `arrived` does not."""

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
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def values(self) -> Any:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
