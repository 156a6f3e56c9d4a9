"""What loaders are called with, checked against this process and the source."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist

from ..common.errors import DataError, suggest
from .beton.data_set import BetonFiles
from .beton.image_modes import RGB, channels_text
from .options import LoaderKeywords, LoaderOptions


def require_pages(beton: BetonFiles | None) -> BetonFiles:
    if beton is None:
        raise DataError(
            "order='quasi_random' reads a .beton file page by page, but this source has no pages. Set "
            "order='random', or convert it."
        )
    return beton


def options_here(given: LoaderKeywords) -> LoaderOptions:
    """Return the checked options of a loader of this process; those that are None follow from the others."""
    train = given.get("train", True)
    rank, world_size = find_ranks(given.get("rank"), given.get("world_size"))
    order = given.get("order") or ("random" if train else "sequential")
    drop_last = given.get("drop_last")
    decided = {"rank": rank, "world_size": world_size, "order": order, "drop_last": drop_last or False}
    made = LoaderOptions.of({**given, **decided})
    equal = made.train and made.world_size > 1 and not made.pad_last
    return dataclasses.replace(made, drop_last=True) if drop_last is None and equal else made


def find_ranks(rank: Any, world_size: Any) -> tuple[Any, Any]:
    """Return this process's rank and world size: as given, else those of torch.distributed's process group. A launched
    process must have joined its group: otherwise every rank would load all samples."""
    if (rank is None) != (world_size is None):
        raise DataError(
            f"rank={rank!r} and world_size={world_size!r}: pass both, or neither, to use those of torch.distributed's "
            "process group."
        )
    if rank is not None:
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    started = os.environ.get("WORLD_SIZE", "")
    if {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ) and started not in ("", "1"):
        raise DataError(
            f"A launcher started this process as one of WORLD_SIZE={started}, but it has not joined their process "
            "group. Call torch.distributed.init_process_group() before creating the loader, or pass rank= and "
            "world_size= (rank=0, world_size=1: all samples)."
        )
    return 0, 1


def check_device(device: torch.device | str) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise DataError(f"device={device!r} is not a torch device. Use 'cpu' or 'cuda'.") from None
    if parsed.type not in ("cpu", "cuda"):
        raise DataError(f"device={device!r} is not supported for batches. Use 'cpu' or 'cuda'.")
    if parsed.type == "cuda" and (parsed.index or 0) >= (found := torch.cuda.device_count()):
        raise DataError(f"device={device!r} does not exist: torch finds {found} CUDA devices.")
    return parsed


def check_images(options: LoaderOptions, channels: int, depth: int, source: str) -> None:
    """Raise `DataError` for options that images of so many channels and bits do not have."""
    if len(options.mean) != channels:
        values = f"{channels} value{'s' * (channels > 1)}"
        raise DataError(
            f"The images of {source} have {channels_text(channels, depth)}, but mean={options.mean!r} and "
            f"std={options.std!r} are of {len(options.mean)}. Pass mean= and std= with {values}, for pixels "
            "scaled to 0–1."
        )
    if (channels, depth) == RGB:
        return
    for _, own in options.groups:
        for name, wrong, remedy in (
            ("interpolation", own.interpolation == "area", "Use 'bilinear', 'bicubic' or 'nearest'"),
            ("dtype", own.dtype == torch.uint8 and depth == 16, "Use torch.float32 or torch.bfloat16"),
            *((name, True, "Leave it out: it is for colors in RGB") for name in own.only_rgb),
        ):
            if wrong:
                raise DataError(
                    f"{name}={getattr(own, name)!r} is for RGB with 8 bits, but the images of {source} have "
                    f"{channels_text(channels, depth)}. {remedy}."
                )


def check_contents(settings: LoaderOptions, beton: BetonFiles | None) -> None:
    """Reject settings that require what the source does not have."""
    where, known = "this source, which has none (convert it to a .beton file)", list[str]()
    if beton is not None:
        where, known = beton.name, list(beton.fields)
    for name in settings.fields:
        if name not in known:
            wrong = f"fields={list(settings.fields)}: {name!r} is not a field of {where}."
            raise DataError(wrong + suggest(name, known))
    if settings.verify and (beton is None or not beton.has_checksums):
        where = "the source is not a .beton file" if beton is None else f"{beton.name} has no manifest"
        raise DataError(f"verify=True needs the checksums of a manifest, but {where}. Remove verify=True.")
    if beton is not None:
        check_images(settings, beton.channels, beton.depth, beton.name)
