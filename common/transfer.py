"""Copies to a device for which the host does not wait."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device`: from pinned memory, as from pageable memory the host would wait for the work
    queued before it. torch does not reuse the pinned memory until the copy is done."""
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)
