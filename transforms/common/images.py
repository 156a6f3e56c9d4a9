"""Helpers of the batch transforms: batch checks, soft targets, resizing and memory format.

Shapes: B batch, C channels or classes, H and W pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...common.errors import DataError
from ...common.transfer import to_device


def check_batch(owner: object, images: torch.Tensor, targets: torch.Tensor) -> None:
    """Raise `DataError` unless images are (B, C, H, W) and targets (B,) or (B, C)."""
    if images.dim() != 4 or targets.dim() not in (1, 2) or len(targets) != len(images):
        raise DataError(
            f"{type(owner).__name__}: unsupported batch of images {tuple(images.shape)} and targets "
            f"{tuple(targets.shape)}. Pass images (B, C, H, W) with targets (B,) or (B, C)."
        )


def check_mixable(owner: object, images: torch.Tensor) -> None:
    """Raise `DataError` unless the images are floating-point, so that two can be averaged."""
    if not images.is_floating_point():
        raise DataError(
            f"{type(owner).__name__}: images of {images.dtype} cannot be averaged. Normalise them to floating "
            "point first."
        )


def soft_targets(owner: object, targets: torch.Tensor, classes: int | None) -> torch.Tensor:
    """Return targets (B, C) in float32 from class indices (B,) or probabilities (B, C).

    Indices on a CUDA device are not checked, because that would synchronise in each step. There, a row whose
    index is outside 0 to `classes` - 1 becomes NaN, and so does the loss.

    Raises:
        DataError: if there are class indices but no `classes`, an index on the CPU is outside 0 to `classes` - 1
            (-100 means "ignore this row", and half of a mixture cannot be ignored), or the widths differ.
    """
    name = type(owner).__name__
    if targets.is_floating_point() and targets.dim() == 2:
        if classes is not None and targets.shape[1] != classes:
            raise DataError(
                f"{name}: soft targets are {targets.shape[1]} wide, but there are {classes} classes. Make both "
                "equal."
            )
        return targets.float()
    if targets.dim() != 1 or targets.is_floating_point():
        raise DataError(
            f"{name}: targets {tuple(targets.shape)} of {targets.dtype} are neither class indices (integers, (B,)) "
            "nor probabilities (floats, (B, C)). Pass one of the two."
        )
    if classes is None:
        raise DataError(
            f"{name}: the number of classes cannot be inferred from class indices. Pass BatchContext(classes=…) "
            "or soft targets (B, C)."
        )
    if targets.device.type == "cpu" and len(targets):
        least, most = torch.stack(targets.aminmax()).tolist()
        if least < 0 or most >= classes:
            wrong = least if least < 0 else most
            raise DataError(
                f"{name}: target {wrong} is not a class index from 0 to {classes - 1}, and half of a mixture "
                "cannot be ignored. Drop such rows from the data."
            )
    return spread_indices(targets, classes, 0.0, 1.0)


def spread_indices(
    indices: torch.Tensor, classes: int, low: float, high: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return (B, classes) of `low`, with `high` at each row's class index; `indices` (B,) are integers.

    An index outside 0 to `classes` - 1 raises torch's error on the CPU, and gives a row of NaN on a CUDA device.
    """
    soft = torch.full((len(indices), classes), low, dtype=dtype, device=indices.device)
    index = indices.long()[:, None]
    if indices.device.type == "cpu":
        return soft.scatter_(1, index, high)
    # An out-of-range index would make CUDA unusable for the process, without a message that names it.
    outside = (index < 0) | (index >= classes)
    return soft.scatter_(1, index.masked_fill(outside, 0), high).masked_fill_(outside, torch.nan)


def draw_partners(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return each image's mixing partner as (B,) indices, on the device of `images`."""
    return to_device(torch.randperm(len(images), generator=generator), images.device)


def mix_targets(soft: torch.Tensor, partner: torch.Tensor, share: float) -> torch.Tensor:
    """Return (1 - share) · soft + share · soft[partner], (B, C)."""
    return soft.lerp(soft[partner], share)


def resize(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return images (B, C, height, width), bilinear and antialiased, with the same dtype and memory format."""
    if images.shape[-2:] == (height, width):
        return images
    # In float32, because torch's antialiased CPU kernel does not support half precision.
    work = images if images.dtype in (torch.float32, torch.float64) else images.float()
    small = F.interpolate(work, size=(height, width), mode="bilinear", antialias=True)
    if not images.is_floating_point():
        small = small.round_()
    return keep_format(small.to(images.dtype), images)


def keep_format(result: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Return `result` (B, C, h, w) in the memory format of `images` (B, C, H, W)."""
    if images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous():
        return result.contiguous(memory_format=torch.channels_last)
    return result.contiguous()
