"""The settings that both loaders share, checked once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..common import machine
from ..common.checks import are_numbers, check_whole, is_flag, is_number, is_whole, make_plain, plain
from ..common.errors import DataError, suggest
from .beton.image_modes import CHANNELS, RGB, channels_text
from .beton.targets import MOVING
from .decode.policies import complete
from .image_size import ImageSize, height_width, is_size, size_text, usual_size
from .order import ORDERS

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""ImageNet's, for pixels scaled to 0–1; torchvision's documented values."""

ON_ERROR = ("raise", "skip")
CROPS = ("resized", "random", "whole", "fit", "padded")
EVAL_CROPS = ("center", "whole", "fit")
EVAL_RATIO = 224 / 256
PADDING_MODES = ("reflect", "constant")
INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "area")
VIEW_SETTINGS = (
    "image_size", "crop", "scale", "ratio", "padding", "padding_mode", "flip", "color_jitter", "policy", "cutout"
)  # fmt: skip
"""The settings in which groups of views may differ."""
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@dataclass(frozen=True)
class Settings:
    """How images become batches. See `FFCVLoader` for each setting.

    Raises:
        DataError: naming the setting, its value, and what is allowed.
    """

    batch_size: int
    image_size: ImageSize
    train: bool = True
    seed: int = 0
    order: str = "random"
    drop_last: bool = False
    pad_last: bool = False
    crop: str = "resized"
    scale: tuple[float, float] = (0.25, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = 4
    padding_mode: str = "reflect"
    views: int | tuple[Mapping[str, Any], ...] = 1
    eval_crop: str = "center"
    eval_ratio: float = EVAL_RATIO
    interpolation: str = "bilinear"
    flip: bool | str = True
    color_jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    policy: Mapping[str, Any] | None = None
    cutout: int = 0
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    dtype: torch.dtype = torch.float32
    fields: tuple[str, ...] | Mapping[str, str | None] = ()
    verify: bool = False
    on_error: str = "raise"
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        def check(name: str, valid: bool, allowed: str) -> None:
            if not valid:
                raise DataError(f"{name}={getattr(self, name)!r} must be {allowed}.")

        make_plain(self)
        object.__setattr__(self, "image_size", usual_size(self.image_size))
        self._check_types(check)
        check("batch_size", self.batch_size >= 1, "at least 1")
        check("world_size", self.world_size >= 1, "at least 1")
        check("seed", 0 <= self.seed < 2**63, "an integer, 0 or more")
        for name, known in (
            ("order", ORDERS), ("crop", CROPS), ("padding_mode", PADDING_MODES), ("eval_crop", EVAL_CROPS),
            ("interpolation", INTERPOLATIONS),
        ):  # fmt: skip
            value = getattr(self, name)
            article = "an" if name[0] in "aeiou" else "a"
            check(
                name,
                isinstance(value, str) and value in known,
                f"{article} {name}.{suggest(str(value), known)}"[:-1],
            )
        check("on_error", self.on_error in ON_ERROR, "'raise' or 'skip'")
        check("pad_last", not (self.pad_last and self.drop_last), "False if drop_last is True")
        check(
            "scale", 0 < self.scale[0] <= self.scale[1] <= 1, "two fractions of the area, 0 < low ≤ high ≤ 1"
        )
        check("ratio", 0 < self.ratio[0] <= self.ratio[1], "two aspect ratios, 0 < low ≤ high")
        if self.shifts:
            check("padding", 0 <= self.padding < min(self.size), "from 0 to less than image_size pixels")
        check(
            "eval_ratio",
            is_number(self.eval_ratio, "(0, 1]"),
            "a fraction of the shorter side, above 0 and at most 1",
        )
        self._check_contradictions()
        check("color_jitter", min(self.color_jitter) >= 0, "three strengths, 0 or more")
        if self.policy is not None:
            complete(self.policy)
        if isinstance(self.views, int):
            check("views", self.views >= 1, "at least 1")
        if self.has_views:
            check("flip", not self.alternates, "True or False with several views per image")
            self.groups  # noqa: B018 — each has the settings of a loader, which are checked
        check("cutout", 0 <= self.cutout <= min(self.size), "a side from 0 to image_size pixels")
        check("std", min(self.std) > 0, "positive numbers")
        check(
            "dtype",
            isinstance(self.dtype, torch.dtype) and self.dtype in DTYPES,
            "torch.float32, torch.bfloat16 or torch.uint8",
        )
        check("rank", 0 <= self.rank < self.world_size, f"from 0 to world_size - 1 = {self.world_size - 1}")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images, in pixels."""
        return height_width(self.image_size)

    @property
    def shifts(self) -> bool:
        """Whether full images are shifted, which requires all of them to have `image_size`."""
        return self.train and self.crop == "padded"

    @property
    def has_views(self) -> bool:
        """Whether several images are made of each sample."""
        return self.train and self.views != 1

    @property
    def groups(self) -> tuple[tuple[int, Settings], ...]:
        """The groups of views: the number of views, and the settings of each. In evaluation, one view."""
        if not self.train or isinstance(self.views, int):
            return ((self.views if isinstance(self.views, int) and self.train else 1, self),)
        made = []
        for group in self.views:
            own = {"views": 1, **group}
            count = own.pop("count", 1)
            made.append((count, dataclasses.replace(self, **own)))
        return tuple(made)

    @property
    def sample_pixels(self) -> int:
        """Pixels of all images that are made of a sample."""
        return sum(count * own.size[0] * own.size[1] for count, own in self.groups)

    @property
    def active_crop(self) -> str:
        """The crop in use: that of training, or of evaluation."""
        return self.crop if self.train else self.eval_crop

    @property
    def pads(self) -> bool:
        """Whether full images are shifted, and what they leave free is filled."""
        return self.shifts and self.padding_mode == "constant"

    @property
    def fill(self) -> tuple[int, ...]:
        """The levels, from 0 to 255, of each channel of what is filled: the mean colour."""
        return fill_color(self.mean)

    @property
    def alternates(self) -> bool:
        """Whether an image's mirroring follows from the epoch instead of a draw."""
        return self.train and self.flip == "alternating"

    def _check_contradictions(self) -> None:
        if self.eval_crop != "center" and self.eval_ratio != EVAL_RATIO:
            raise DataError(
                f"eval_crop={self.eval_crop!r} takes the full image, but eval_ratio={self.eval_ratio!r} is the size of "
                f"a central crop. Leave eval_ratio at {EVAL_RATIO}, or use eval_crop='center'."
            )
        if self.padding_mode != "reflect" and self.crop != "padded":
            raise DataError(
                f"padding_mode={self.padding_mode!r} is of crop='padded', but crop={self.crop!r} does not pad. Leave "
                "padding_mode out, or use crop='padded'."
            )

    def _check_types(self, check: Callable[[str, bool, str], None]) -> None:
        check("image_size", is_size(self.image_size), "a positive integer, or two: height and width")
        for name in ("batch_size", "seed", "padding", "cutout", "rank", "world_size"):
            check(name, is_whole(getattr(self, name)), "an integer")
        for name in ("train", "drop_last", "pad_last", "verify"):
            check(name, is_flag(getattr(self, name)), "True or False")
        alternating = isinstance(self.flip, str) and self.flip == "alternating"
        check("flip", is_flag(self.flip) or alternating, "True, False or 'alternating'")
        for name in ("scale", "ratio"):
            check(name, are_numbers(getattr(self, name), 2), "2 finite numbers")
        for name in ("mean", "std"):
            numbers = any(are_numbers(getattr(self, name), count) for count in CHANNELS)
            check(name, numbers, "3 finite numbers, one per channel; for images with 1 or 4, as many")
        check("std", len(self.std) == len(self.mean), f"as many numbers as mean={self.mean!r}")
        check(
            "color_jitter",
            are_numbers(self.color_jitter, 3),
            "3 finite numbers: three strengths",
        )
        self._check_views(check)
        fields = self.fields
        listed = isinstance(fields, tuple | list | Mapping) and all(isinstance(name, str) for name in fields)
        check("fields", listed, "a list of names, or a dict of names and kinds")
        for name, kind in fields.items() if isinstance(fields, Mapping) else ():
            if kind is not None and kind not in MOVING:
                raise DataError(
                    f"fields={{{name!r}: {kind!r}}}: the kind of a field that moves with the image must be one of "
                    f"{', '.join(map(repr, MOVING))}; None is for one that does not."
                )

    def _check_views(self, check: Callable[[str, bool, str], None]) -> None:
        views: Any = self.views
        if is_whole(views):
            return
        grouped = isinstance(views, tuple | list) and len(views) > 0
        grouped = grouped and all(isinstance(group, Mapping) for group in views)
        check("views", grouped, "an integer, or a list of dicts such as {'count': 2, 'image_size': 96}")
        known = ("count", *VIEW_SETTINGS)
        for group in views:
            for name in group:
                if name not in known:
                    raise DataError(f"views: {name!r} cannot differ among views.{suggest(str(name), known)}")
            if not is_whole(group.get("count", 1), 1):
                raise DataError(f"views: count={group['count']!r} must be a positive integer.")
        object.__setattr__(self, "views", tuple(views))


def fill_color(mean: Sequence[float], depth: int = 8) -> tuple[int, ...]:
    """Return the levels of that mean colour, of `depth` bits; `mean` is for pixels scaled to 0–1."""
    most = (1 << depth) - 1
    return tuple(min(max(round(level * most), 0), most) for level in mean)


def check_images(settings: Settings, channels: int, depth: int, source: str) -> None:
    """Raise `DataError` for settings that images of so many channels and bits do not have."""
    if len(settings.mean) != channels:
        values = f"{channels} value{'s' * (channels > 1)}"
        raise DataError(
            f"The images of {source} have {channels_text(channels, depth)}, but mean={settings.mean!r} and "
            f"std={settings.std!r} are of {len(settings.mean)}. Pass mean= and std= with {values}, for pixels "
            "scaled to 0–1."
        )
    if (channels, depth) == RGB:
        return
    refused: list[tuple[str, bool, str]] = [
        ("interpolation", settings.interpolation == "area", "Use 'bilinear', 'bicubic' or 'nearest'"),
        ("dtype", settings.dtype == torch.uint8 and depth == 16, "Use torch.float32 or torch.bfloat16"),
    ]
    for _, own in settings.groups:
        for name, wrong, remedy in (
            *refused,
            ("color_jitter", own.train and any(own.color_jitter), "Leave it out: it is for colours in RGB"),
            ("policy", own.train and own.policy is not None, "Leave it out: it is for colours in RGB"),
        ):
            if wrong:
                raise DataError(
                    f"{name}={getattr(own, name)!r} is for RGB with 8 bits, but the images of {source} have "
                    f"{channels_text(channels, depth)}. {remedy}."
                )


def odd_size(sample: str, width: int, height: int, image_size: ImageSize) -> DataError:
    """Return the error for an image that does not have the size that the padded crop requires."""
    return DataError(
        f"crop='padded' shifts full images, which must all have {size_text(image_size)} pixels (height × width); "
        f"{sample} has {height} × {width}. Use crop='resized'."
    )


def too_small(sample: str, height: int, width: int, image_size: ImageSize) -> DataError:
    """Return the error for an image that is smaller than a random crop, which is not resized."""
    return DataError(
        f"crop='random' cuts {size_text(image_size)} pixels (height × width) out of each image, but {sample} has "
        f"{height} × {width}. Use a smaller image_size, or crop='resized'."
    )


def make_settings(**settings: Any) -> Settings:
    """Return the checked settings; rank, world size and drop_last are resolved if they are None.

    Raises:
        DataError: for an invalid or unknown setting.
    """
    known = [field.name for field in fields(Settings)]
    for name in settings:
        if name not in known:
            raise DataError(f"{name}= is not a loader setting.{suggest(name, known)}")
    rank, world_size = find_ranks(settings.pop("rank", None), settings.pop("world_size", None))
    drop_last = settings.pop("drop_last", None)
    made = Settings(
        rank=rank, world_size=world_size, drop_last=False if drop_last is None else drop_last, **settings
    )
    equal = made.train and made.world_size > 1 and not made.pad_last
    return dataclasses.replace(made, drop_last=True) if drop_last is None and equal else made


def find_ranks(rank: Any, world_size: Any) -> tuple[Any, Any]:
    """Return this process's rank and world size: as given, else those of torch.distributed's process group.

    Raises:
        DataError: if only one of them is given, or if a launched process has not joined its group yet: then every rank
            would load all samples.
    """
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
    if all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")) and started not in (
        "",
        "1",
    ):
        raise DataError(
            f"A launcher started this process as one of WORLD_SIZE={started}, but it has not joined their process "
            "group. Call torch.distributed.init_process_group() before creating the loader, or pass rank= and "
            "world_size= (rank=0, world_size=1: all samples)."
        )
    return 0, 1


def check_device(device: torch.device | str) -> torch.device:
    """Return the device that batches go to.

    Raises:
        DataError: if the name is invalid, or there is no such device.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise DataError(f"device={device!r} is not a torch device. Use 'cpu' or 'cuda'.") from None
    if parsed.type not in ("cpu", "cuda"):
        raise DataError(f"device={device!r} is not supported for batches. Use 'cpu' or 'cuda'.")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise DataError(
            f"device={device!r} does not exist: torch finds {torch.cuda.device_count()} CUDA devices."
        )
    return parsed


def check_workers(workers: Any, least: int = 1) -> int:
    """Return the number of threads or processes: as given, or for None one per available core.

    Raises:
        DataError: if it is less than `least`, or not a number.
    """
    if workers is None:
        return machine.rank_cores()
    workers = plain(workers)
    check_whole("workers", workers, DataError, least, also=", or None for one per core")
    return int(workers)


def check_ahead(batches_ahead: Any) -> int:
    """Return the number of batches to prepare while one is in use.

    Raises:
        DataError: if it is not a positive integer.
    """
    batches_ahead = plain(batches_ahead)
    check_whole("batches_ahead", batches_ahead, DataError, 1)
    return int(batches_ahead)


def check_indices(indices: Any, samples: int) -> NDArray[np.int64]:
    """Return the indices to load, or all of them; for a boolean mask `(samples,)`, those that are True.

    Raises:
        DataError: if one is out of range, or none is left.
    """
    if indices is None:
        return np.arange(samples, dtype=np.int64)
    chosen = np.asarray(indices)
    if chosen.dtype == np.bool_ and chosen.shape == (samples,):
        chosen = np.flatnonzero(chosen)
    if chosen.ndim != 1 or len(chosen) == 0 or not np.issubdtype(chosen.dtype, np.integer):
        raise DataError(f"indices must be a non-empty list of sample indices, not {indices!r:.80}.")
    outside = (chosen < 0) | (chosen >= samples)
    if outside.any():
        raise DataError(
            f"indices contains {chosen[outside][0]}, but the data set has samples 0 to {samples - 1}."
        )
    return chosen.astype(np.int64)
