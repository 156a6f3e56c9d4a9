"""Copies to a device that the host does not wait for."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the CPU tensor `tensor` on `device`, with the same values, shape and strides.

    To a CUDA device it travels from pinned memory, behind the work that is queued on the current stream: from
    pageable memory, the host would wait until that work is done. The pinned memory is torch's, which does not use
    it again before the copy is done. A tensor that is pinned already is not copied on the host.
    """
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


__all__ = ["to_device"]
