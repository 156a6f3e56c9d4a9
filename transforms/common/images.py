"""What the batch methods share: checks of a batch, soft targets, resizing, and the memory format.

Shapes: B batch, C channels or classes, H and W pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...errors import DataError
from ...transfer import to_device


def check_batch(owner: object, images: torch.Tensor, targets: torch.Tensor) -> None:
    """Raises a `DataError` unless images are (B, C, H, W) and targets (B,) or (B, C)."""
    if images.dim() != 4 or targets.dim() not in (1, 2) or len(targets) != len(images):
        raise DataError(
            f"{type(owner).__name__}: images {tuple(images.shape)} and targets {tuple(targets.shape)} are no "
            "batch it can take; give images (B, C, H, W) with targets (B,) or (B, C)."
        )


def check_mixable(owner: object, images: torch.Tensor) -> None:
    """Raises a `DataError` unless the images are floating-point, so that a mean of two can be held."""
    if not images.is_floating_point():
        raise DataError(
            f"{type(owner).__name__}: images of {images.dtype} cannot be averaged; normalise them to "
            "floating point first."
        )


def soft_targets(owner: object, targets: torch.Tensor, classes: int | None) -> torch.Tensor:
    """Targets (B, C) in float32 from class indices (B,) or probabilities (B, C).

    Indices on a CUDA device are not checked, because the host would wait for them in each step: there, a row
    whose index is not from 0 to `classes` - 1 becomes NaN, and so does the loss.

    Raises:
        DataError: if there are class indices and no `classes`, an index on the CPU is not from 0 to `classes` - 1
            (-100 means "ignore this row", and half of a mixture cannot be ignored), or the widths differ.
    """
    name = type(owner).__name__
    if targets.is_floating_point() and targets.dim() == 2:
        if classes is not None and targets.shape[1] != classes:
            raise DataError(
                f"{name}: soft targets are {targets.shape[1]} wide, but there are {classes} classes; "
                "make both the same."
            )
        return targets.float()
    if targets.dim() != 1 or targets.is_floating_point():
        raise DataError(
            f"{name}: targets {tuple(targets.shape)} of {targets.dtype} are neither class indices (B,) of "
            "integers nor probabilities (B, C) of floats; give one of the two."
        )
    if classes is None:
        raise DataError(
            f"{name}: the number of classes cannot be known from class indices; "
            "give BatchContext(classes=…) or soft targets (B, C)."
        )
    if targets.device.type == "cpu" and len(targets):
        least, most = torch.stack(targets.aminmax()).tolist()
        if least < 0 or most >= classes:
            wrong = least if least < 0 else most
            raise DataError(
                f"{name}: target {wrong} is not a class from 0 to {classes - 1}, and a mixture of two images "
                "cannot ignore one of them; drop such rows from the data."
            )
    return spread_indices(targets, classes, 0.0, 1.0)


def spread_indices(
    indices: torch.Tensor, classes: int, low: float, high: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return (B, classes) of `low`, with `high` at each row's class index; `indices` (B,) are integers.

    An index that is not from 0 to `classes` - 1 is torch's error on the CPU, and a row of NaN on a CUDA device.
    """
    soft = torch.full((len(indices), classes), low, dtype=dtype, device=indices.device)
    index = indices.long()[:, None]
    if indices.device.type == "cpu":
        return soft.scatter_(1, index, high)
    # An index out of range would end the process's use of the device, with no message that names it.
    outside = (index < 0) | (index >= classes)
    return soft.scatter_(1, index.masked_fill(outside, 0), high).masked_fill_(outside, torch.nan)


def draw_partners(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return which image of the batch each one is mixed with: (B,) indices, on the device of `images`."""
    return to_device(torch.randperm(len(images), generator=generator), images.device)


def mix_targets(soft: torch.Tensor, partner: torch.Tensor, share: float) -> torch.Tensor:
    """(1 - share) · soft + share · soft[partner], (B, C)."""
    return soft.lerp(soft[partner], share)


def resize(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Images (B, C, height, width), bilinear and antialiased, of the same dtype and memory format."""
    if images.shape[-2:] == (height, width):
        return images
    # In float32, because torch's antialiased kernel has no half precision on the CPU.
    work = images if images.dtype in (torch.float32, torch.float64) else images.float()
    small = F.interpolate(work, size=(height, width), mode="bilinear", antialias=True)
    if not images.is_floating_point():
        small = small.round_()
    return keep_format(small.to(images.dtype), images)


def keep_format(result: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """`result` (B, C, h, w) in the memory format of `images` (B, C, H, W)."""
    if images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous():
        return result.contiguous(memory_format=torch.channels_last)
    return result.contiguous()


__all__ = [
    "check_batch",
    "check_mixable",
    "draw_partners",
    "keep_format",
    "mix_targets",
    "resize",
    "soft_targets",
    "spread_indices",
]
