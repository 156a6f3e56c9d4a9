"""Copies to a device for which the host does not wait."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device`.

    The copy to a CUDA device is from pinned memory and queued on the current stream: from pageable memory, the host
    would wait for the work queued before it. torch's caching allocator does not reuse the pinned memory until the copy
    is done. An already pinned tensor is not copied on the host.
    """
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
