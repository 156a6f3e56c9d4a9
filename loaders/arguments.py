"""What loaders are called with, checked against this process and the source."""

from __future__ import annotations

import torch

from ..common.errors import DataError, suggest
from .beton.data_set import BetonFiles
from .beton.image_modes import RGB, channels_text
from .options import LoaderOptions


def require_pages(beton: BetonFiles | None) -> BetonFiles:
    if beton is None:
        raise DataError(
            "order='quasi_random' reads a .beton file page by page, but this source has no pages. Set "
            "order='random', or convert it."
        )
    return beton


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
