"""What the batch methods share: checks of a batch, soft targets, resizing, and the memory format.

Shapes: B batch, C channels or classes, H and W pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import DataError


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

    Indices are checked, which reads two numbers back from the device: one synchronisation.

    Raises:
        DataError: if there are class indices and no `classes`, an index is not from 0 to `classes` - 1
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
    least, most = torch.stack(targets.aminmax()).tolist()
    if least < 0 or most >= classes:
        wrong = least if least < 0 else most
        raise DataError(
            f"{name}: target {wrong} is not a class from 0 to {classes - 1}, and a mixture of two images "
            "cannot ignore one of them; drop such rows from the data."
        )
    return F.one_hot(targets.long(), classes).float()


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


__all__ = ["check_batch", "check_mixable", "keep_format", "mix_targets", "resize", "soft_targets"]
