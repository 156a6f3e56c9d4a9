"""Helpers of the batch transforms. Shapes: B batch, C channels or classes, H and W pixels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.errors import DataError
from ...common.transfer import to_device


def check_batch(owner: object, images: Tensor, targets: Tensor) -> None:
    if images.dim() != 4 or targets.dim() not in (1, 2) or len(targets) != len(images):
        raise DataError(
            f"{type(owner).__name__}: unsupported batch of images {tuple(images.shape)} and targets "
            f"{tuple(targets.shape)}. Pass images (B, C, H, W) with targets (B,) or (B, C)."
        )


def soft_targets(owner: object, targets: Tensor, classes: int | None) -> Tensor:
    """Return targets (B, C) in float32 from class indices (B,) or probabilities (B, C). Indices on a CUDA device are
    not checked, because that would synchronize in each step: see `spread_indices`."""
    name = type(owner).__name__
    if targets.is_floating_point() and targets.dim() == 2:
        if classes is not None and targets.shape[1] != classes:
            raise DataError(
                f"{name}: soft targets are {targets.shape[1]} wide, but there are {classes} classes. Make both equal."
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
    indices: Tensor, classes: int, low: float, high: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return (B, classes) of `low`, with `high` at each row's class index. An index outside 0 to `classes` - 1 raises
    torch's error on the CPU, and gives a row of NaN on a CUDA device."""
    soft = torch.full((len(indices), classes), low, dtype=dtype, device=indices.device)
    index = indices.long()[:, None]
    if indices.device.type == "cpu":
        return soft.scatter_(1, index, high)
    # An out-of-range index would make CUDA unusable for the process, without a message that names it.
    outside = (index < 0) | (index >= classes)
    return soft.scatter_(1, index.masked_fill(outside, 0), high).masked_fill_(outside, torch.nan)


def draw_partners(images: Tensor, generator: torch.Generator) -> Tensor:
    return to_device(torch.randperm(len(images), generator=generator, device="cpu"), images.device)


def height_width(image_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return both sides of a size, of which one number is a square."""
    return image_size if isinstance(image_size, tuple) else (image_size, image_size)


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Return resized images, bilinear and antialiased, with the same dtype and memory format."""
    if images.shape[-2:] == (height, width):
        return images
    # In float32, because torch's antialiased CPU kernel does not support half precision.
    work = images if images.dtype in (torch.float32, torch.float64) else images.float()
    small = F.interpolate(work, size=(height, width), mode="bilinear", antialias=True)
    if not images.is_floating_point():
        small = small.round_()
    return keep_format(small.to(images.dtype), images)


def keep_format(result: Tensor, images: Tensor) -> Tensor:
    if images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous():
        return result.contiguous(memory_format=torch.channels_last)
    return result.contiguous()
