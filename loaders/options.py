"""The options of the loaders: how a file is read, and how its images become batches. torch is not imported.

To add one, add a field, and the line that uses it; run `python .ci/signatures.py` once. An
augmentation of `FFCVLoader` is drawn in `decode/augmentation.py` and computed in `native/`; `TorchLoader` has
torchvision's equivalent, in `datasets/torch_dataset.py`. The marks `PER_VIEW` and `RGB_ONLY` declare where it is
available; what else FFCV's own loader rejects is in `stock_options` (`stock_loader.py`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Required, Self, TypedDict

from ..common.checks import are_numbers, check_whole, is_whole, plain
from ..common.errors import DataError, DrivetrainError, suggest
from ..common.options.config import (
    BY_CALLER,
    IN_WORDS,
    NONE,
    Config,
    Kind,
    PathText,
    Positive,
    Seed,
    Within,
    either,
    options_of,
)
from ..common.storage.addresses import PATIENCE
from .decode.policies import complete
from .image_size import ImageSize, height_width, is_size, size_text, usual_size

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# ImageNet's, for pixels scaled to 0–1; torchvision's documented values.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

EVAL_RATIO = 224 / 256
PER_VIEW = object()  # a mark: groups of views may differ in the option
RGB_ONLY = object()  # a mark: in training, for RGB with 8 bits, and not in FFCV's own loader; off by default
_OF_CROP = {"scale": "resized", "ratio": "resized", "padding": "padded", "padding_mode": "padded"}
"""Maps each option that only one crop uses to that crop."""
SIZE = Kind(lambda value: is_size(usual_size(value)), "a positive integer, or two: height and width")
POLICY = Kind(lambda value: isinstance(value, Mapping), "a dict with a name")
CHANNEL_VALUES = Kind(
    lambda value: any(are_numbers(value, channels) for channels in (1, 3, 4)),
    "3 finite numbers, one per channel; for images with 1 or 4, as many",
)


def _default_dtype() -> torch.dtype:
    import torch

    return torch.float32


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Config):
    """How a file is read: the options that the loaders share with `Pipeline.load`."""

    error: ClassVar[type[DrivetrainError]] = DataError

    batch_size: Annotated[Positive, IN_WORDS]
    """Global batch size, in images, over all ranks. Step k trains on the same samples on one device or on eight."""
    image_size: Annotated[ImageSize, SIZE, PER_VIEW, IN_WORDS]
    """Side of square images, or height and width, in pixels. In training, a JPEG with a crop at least twice as large is
    decoded at half (a quarter, an eighth) of its size; see `interpolation`. `set_image_size` changes a loader's between
    epochs."""
    workers: int | None = None
    """Loader threads (ffcv, ffcv_stock) or processes (torch) per rank; None: one per core."""
    batches_ahead: Positive = 3
    """Batches that the loader prepares while one is in use. More even out samples that take long; each takes the memory
    of a batch. 3 is FFCV's."""
    cache: Annotated[PathText | Path | None, IN_WORDS] = None
    """Folder of the local copies of files at an address; None: remote in $DRIVETRAIN_DATA, else in
    $XDG_CACHE_HOME/drivetrain, by default ~/.cache/drivetrain. The ranks of a machine, and later jobs, share a copy."""
    cache_limit: Annotated[float | None, Within("(0, 1e9]", ", in GB"), IN_WORDS] = None
    """GB that these copies may take on disk; None: no limit. Copies that nobody uses are removed, the least recently
    used first."""
    stream: bool = False
    """Keep no whole copies of files at an address, but what the next batches need, and as much of the next epoch as
    fits into `cache_limit` (None: half of the free disk), which the ranks of a machine divide: for data larger than
    the disk. What is needed the latest is dropped first. Only with `loader="ffcv"`, on Linux; nothing is left for
    later jobs."""
    patience: Annotated[float, Within("[0, 1e9]", ", in seconds"), IN_WORDS] = PATIENCE
    """Seconds for which the server of files at an address may not answer. Its requests are repeated with growing
    pauses, which is reported. Five minutes are enough for the restart of a server or a router."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Config):
    """How images are cropped, resized, augmented and normalized."""

    error: ClassVar[type[DrivetrainError]] = DataError

    crop: Annotated[Literal["resized", "random", "whole", "fit", "padded"], PER_VIEW] = "resized"
    """Crop in training: `"resized"` (Inception's random resized crop), `"random"` (a place in the image, in its own
    resolution: torchvision's `RandomCrop`), `"whole"` and `"fit"` (as `eval_crop`), or `"padded"` (the full image
    shifted by up to `padding` pixels; the usual choice for CIFAR)."""
    scale: Annotated[tuple[float, float], PER_VIEW] = (0.25, 1.0)
    """Fraction of the area that a resized crop covers. Default (0.25, 1), as in ffcv-imagenet's recipes."""
    ratio: Annotated[tuple[float, float], PER_VIEW] = (3 / 4, 4 / 3)
    """Aspect ratio of a resized crop."""
    padding: Annotated[int, PER_VIEW] = 4
    """Maximum shift of the padded crop, in pixels. Default 4, the usual choice for CIFAR's 32 pixels."""
    padding_mode: Annotated[Literal["reflect", "constant"], PER_VIEW] = "reflect"
    """What the padded crop has beyond the image's edges: `"reflect"` (default), its pixels, mirrored; or `"constant"`,
    the mean color (`mean`, rounded to levels): torchvision's `RandomCrop` with that `fill`."""
    views: int | Sequence[Mapping[str, Any]] = 1
    """Number of images to make of each training sample, from one decoding. Each view's draws are a function of (seed,
    epoch, sample, view). Above 1, images are `(B, V, C, H, W)`. Or a list of dicts, such as `[{"count": 2, "scale":
    (0.4, 1)}, {"count": 4, "image_size": 96, "scale": (0.05, 0.4)}]` (multi-crop; Caron et al. 2020, arXiv:2006.09882):
    images are a tuple of such tensors, one per dict. `image_size` and the options of crop, flip, color, policy and
    cutout may differ among them. A JPEG is decoded at a smaller size only if this suffices for all views.
    Default 1: images are `(B, C, H, W)`."""
    eval_crop: Literal["center", "whole", "fit"] = "center"
    """Crop in evaluation: `"center"` (a central crop, resized; default), `"whole"` (the full image, resized to the
    shape of the output, whatever its own; timm's "squash") or `"fit"` (a letterbox: the full image, scaled to fit, in
    its own shape, and centered on the mean color; timm's "border")."""
    eval_ratio: Annotated[float, Within("(0, 1]", ", a fraction of the shorter side")] = EVAL_RATIO
    """With `eval_crop="center"`, the size of the central crop relative to the largest one of the shape of the output,
    rounded down to whole pixels, as FFCV's; for square images, its side relative to the image's shorter side. Default
    224/256, customary for ImageNet."""
    interpolation: Literal["bilinear", "bicubic", "nearest", "area"] = "bilinear"
    """Interpolation: `"bilinear"` (default) or `"bicubic"`, antialiased, or `"nearest"`, with exactly the pixels of
    Pillow (since version 13, Pillow shrinks tall images first vertically, which changes some by a level or two); or
    `"area"`, OpenCV's, with exactly FFCV's pixels. Only `"bilinear"` in training is faster and less exact: within two
    levels of Pillow, four if a raw image shrinks more than eightfold, and a few more of JPEGs decoded at a smaller
    size, as in no other case. Of images of other channels, or of 16 bits, each channel is resized by itself; `"area"`,
    `policy`, the options of color and `operations` are not available for them."""
    flip: Annotated[bool | Literal["alternating"], PER_VIEW] = True
    """Whether each training image is mirrored or not, at random in each epoch. `"alternating"`: at random in epoch 0,
    inverted in every odd epoch, so that two epochs show each image both ways (airbench's, arXiv:2404.00498, section
    3.6; better with few epochs). False: never."""
    color_jitter: Annotated[tuple[float, float, float], PER_VIEW, RGB_ONLY] = (0.0, 0.0, 0.0)
    """Maximum deviation of a training image's brightness, contrast and saturation factors from 1, each drawn at random,
    as in torchvision's `ColorJitter`. Default (0, 0, 0): off."""
    policy: Annotated[Mapping[str, Any] | None, POLICY, NONE, PER_VIEW, RGB_ONLY] = None
    """Augmentation policy for training images, after the color operations and before further operations: `{"name":
    "rand_augment", "num_ops": 2, "magnitude": 9, "num_magnitude_bins": 31}`, `{"name": "trivial_augment",
    "num_magnitude_bins": 31}`, `{"name": "aug_mix", "severity": 3, "width": 3, "depth": -1, "alpha": 1.0}` or `{"name":
    "three_augment", "color_jitter": 0.3}`; its options may be omitted. As torchvision's `RandAugment`,
    `TrivialAugmentWide` and `AugMix`, and DeiT III's ThreeAugment. Default None: no policy."""
    cutout: Annotated[int, PER_VIEW] = 0
    """Side, in pixels, of a randomly placed square of a training image that is filled with `mean` (DeVries and Taylor
    2017, arXiv:1708.04552). Default 0: off. With images of changing size, use the transform `CutOut`, whose squares are
    a fraction of the image."""
    mean: Annotated[tuple[float, ...], CHANNEL_VALUES] = IMAGENET_MEAN
    """Mean of each channel, for pixels scaled to 0–1 (by 255, or 65535 for 16 bits). Default: ImageNet's, for three
    channels."""
    std: Annotated[tuple[float, ...], CHANNEL_VALUES] = IMAGENET_STD
    """Standard deviation of each channel, likewise."""
    on_error: Literal["raise", "skip"] = "raise"
    """What to do with a training sample that cannot be decoded, or does not match its checksum: `"raise"` (default), or
    `"skip"`: another one of `indices` takes its place, drawn as a function of (seed, epoch, sample), so that batches
    are the same for any number of workers and ranks; `replaced` lists those of this rank. Evaluation always raises: its
    figures would be of other data. So does a file that has become shorter or cannot be read."""
    verify: bool = False
    """Whether to compare each sample with its CRC-32 in the manifest before it is used. Default False, because it takes
    time; `drivetrain verify` checks the full file once."""
    fields: Sequence[str] | Mapping[str, str | None] = ()
    """Names of further fields of the file, yielded after the labels: a tensor for numbers and arrays, a list for bytes
    and JSON. Targets that move with the image, as `convert` stored them, are cropped, resized and mirrored like its
    pixels, and equal torchvision's `tv_tensors` after the same draws: masks `(B, H, W)` uint8 (int32 if there are class
    indices above 255), resized to the nearest pixel, 255 where there is no image; lists of boxes `(n, 4)` (left, top,
    right, bottom) and of keypoints `(n, 2)` (x, y), float32, in pixels of the output. Boxes are cut at the crop's
    edges, and those outside of it stay, without an area. For a file without a manifest, a dict of names and kinds,
    `{"mask": "mask", "boxes": "boxes", "points": "keypoints"}`; with None, a field is as stored. In a pipeline, they
    are for a task of your own: its targets are a tuple, the labels and then each field."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(ReadOptions, ImageOptions):
    """All options of a loader."""

    place: ClassVar[str] = "The loader"

    train: bool = True
    """True for random crops, flips and the other augmentations; False for `eval_crop`, in order."""
    seed: Seed = 0
    """Seed of order and augmentation."""
    order: Annotated[Literal["random", "quasi_random", "sequential"], BY_CALLER] = "random"
    """Sample order: `"random"`, `"sequential"`, or `"quasi_random"`, which mixes about 16 batches at a time, so that a
    file larger than the memory is read in long runs. Default None: random in training, else sequential."""
    drop_last: Annotated[bool, BY_CALLER] = False
    """Whether to drop a last batch that is not full; `dropped` is the number of samples. Default None: True in training
    on several ranks, so that their shards are equal. With False, training on several ranks repeats the fewest samples
    that make the shards equal, as torch's `DistributedSampler` does (`padded` is their number); evaluation yields each
    sample once, and a last batch with fewer samples than ranks is merged into the previous one."""
    pad_last: bool = False
    """Whether to fill up the last batch with the epoch's first samples; `padded` is the number of repeated samples."""
    dtype: torch.dtype = field(default_factory=_default_dtype)
    """`torch.float32` or `torch.bfloat16`, normalized; or `torch.uint8`, as stored (8 bits only)."""
    rank: Annotated[int, BY_CALLER] = 0
    """This process's shard of each batch, a contiguous slice. Default None, of both `rank` and `world_size`: those of
    torch.distributed's process group, if there is one."""
    world_size: Annotated[Positive, BY_CALLER] = 1
    """Number of shards."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "image_size", usual_size(self.image_size))
        self._check_crops()
        self._check_pixels()
        self._check_fields()
        self._check_views()
        self._check_use()
        self._require("pad_last", not (self.pad_last and self.drop_last), "False if drop_last is True")
        most = self.world_size - 1
        self._require("rank", 0 <= self.rank <= most, f"from 0 to world_size - 1 = {most}")

    @classmethod
    def here(cls, given: LoaderKeywords) -> Self:
        """Return the options of a loader of this process; those that are None follow from the others."""
        train = given.get("train", True)
        rank, world_size = _ranks(given.get("rank"), given.get("world_size"))
        order, drop_last = given.get("order"), given.get("drop_last")
        decided = {
            "rank": rank,
            "world_size": world_size,
            "order": ("random" if train else "sequential") if order is None else order,
            "drop_last": False if drop_last is None else drop_last,
        }
        made = cls.of({**given, **decided})
        equal = made.train and made.world_size > 1 and not made.pad_last
        return dataclasses.replace(made, drop_last=True) if drop_last is None and equal else made

    @property
    def only_rgb(self) -> tuple[str, ...]:
        """Options in use that are only for training on RGB with 8 bits; see `RGB_ONLY`."""
        options = options_of(LoaderOptions).items()
        marked = [name for name, each in options if RGB_ONLY in each.marks and getattr(self, name) != each.default]
        return tuple(marked) if self.train else ()

    def _require(self, name: str, valid: bool, allowed: str) -> None:
        if not valid:
            raise DataError(f"{name}={getattr(self, name)!r} must be {allowed}.")

    def _check_crops(self) -> None:
        low, high = self.scale
        self._require("scale", 0 < low <= high <= 1, "two fractions of the area, 0 < low ≤ high ≤ 1")
        low, high = self.ratio
        self._require("ratio", 0 < low <= high, "two aspect ratios, 0 < low ≤ high")
        if self.shifts:
            self._require("padding", 0 <= self.padding < min(self.size), "from 0 to less than image_size pixels")
        if self.train:  # evaluation, perhaps of smaller images, cuts nothing out
            self._require("cutout", 0 <= self.cutout <= min(self.size), "a side from 0 to image_size pixels")
        if self.eval_crop != "center" and self.eval_ratio != EVAL_RATIO:
            raise DataError(
                f"eval_crop={self.eval_crop!r} takes the full image, but eval_ratio={self.eval_ratio!r} is the size of "
                f"a central crop. Leave eval_ratio at {EVAL_RATIO}, or use eval_crop='center'."
            )

    def _check_pixels(self) -> None:
        import torch

        self._require("std", len(self.std) == len(self.mean), f"as many numbers as mean={self.mean!r}")
        self._require("std", min(self.std) > 0, "positive numbers")
        self._require("color_jitter", min(self.color_jitter) >= 0, "three strengths, 0 or more")
        if self.policy is not None:
            complete(self.policy)
        known = (torch.float32, torch.bfloat16, torch.uint8)
        self._require("dtype", self.dtype in known, "torch.float32, torch.bfloat16 or torch.uint8")

    def _check_fields(self) -> None:
        from .beton.targets import MOVING

        given: Any = self.fields
        in_order = not isinstance(given, set | frozenset)  # that of a set is another one on each rank
        self._require("fields", in_order, "a list of texts, in the order of a batch, or a dict")
        for name, kind in self.fields.items() if isinstance(self.fields, Mapping) else ():
            if kind is not None and kind not in MOVING:
                raise DataError(
                    f"fields={{{name!r}: {kind!r}}}: the kind of a field that moves with the image must be one of "
                    f"{', '.join(map(repr, MOVING))}; None is for one that does not."
                )

    def _check_views(self) -> None:
        if isinstance(self.views, int):
            self._require("views", self.views >= 1, "at least 1")
        else:
            example = "an integer, or a list of dicts such as {'count': 2, 'image_size': 96}"
            self._require("views", len(self.views) > 0, example)
            _check_groups(self.views)
        if self.has_views:
            for _, own in self.groups:  # each has the options of a loader, which are checked
                own._require("flip", not own.alternates, "True or False with several views per image")

    def _check_use(self) -> None:
        """Reject options of a crop that no view has: they would change nothing."""
        groups: Sequence[Mapping[str, Any]] = ({},) if isinstance(self.views, int) else self.views
        crops = [group.get("crop", self.crop) for group in groups]
        for name, crop in _OF_CROP.items():
            value, default = getattr(self, name), options_of(LoaderOptions)[name].default
            if value != default and crop not in crops:
                own = either([f"crop={each!r}" for each in dict.fromkeys(map(str, crops))])
                raise DataError(
                    f"{name}={value!r} is of crop={crop!r}, but {own} does not use it. Leave {name} at {default!r}, or "
                    f"use crop={crop!r}."
                )

    @property
    def size(self) -> tuple[int, int]:
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
    def cuts_out(self) -> bool:
        """Whether squares of `cutout` pixels are filled, which hide more of a smaller image."""
        return any(own.cutout for _, own in self.groups)

    @property
    def groups(self) -> tuple[tuple[int, LoaderOptions], ...]:
        """The groups of views: the number of views, and the settings of each. In evaluation, one view."""
        if not self.train:
            return ((1, self),)
        if isinstance(self.views, int):
            return ((self.views, self),)
        known = options_of(LoaderOptions)
        made = []
        for group in self.views:
            crop = group.get("crop", self.crop)
            # What all views have of another crop does not matter to this group.
            unused = {name: known[name].default for name, other in _OF_CROP.items() if other != crop}
            own = {"views": 1, **unused, **group}
            count = own.pop("count", 1)
            made.append((count, dataclasses.replace(self, **own)))
        return tuple(made)

    @property
    def sample_pixels(self) -> int:
        """Pixels of all images that are made of a sample."""
        return sum(count * own.size[0] * own.size[1] for count, own in self.groups)

    @property
    def active_crop(self) -> str:
        return self.crop if self.train else self.eval_crop

    @property
    def pads(self) -> bool:
        """Whether full images are shifted, and what they leave free is filled."""
        return self.shifts and self.padding_mode == "constant"

    @property
    def alternates(self) -> bool:
        """Whether an image's mirroring follows from the epoch instead of a draw."""
        return self.train and self.flip == "alternating"


class ReadKeywords(TypedDict, total=False):
    """The options of `ReadOptions` as keywords, for type checkers."""

    # keywords of ReadOptions
    batch_size: Required[int]
    image_size: Required[ImageSize]
    workers: int | None
    batches_ahead: int
    cache: str | Path | None
    cache_limit: float | None
    stream: bool
    patience: float
    # end


class ImageKeywords(TypedDict, total=False):
    """The options of `ImageOptions` as keywords, for type checkers."""

    # keywords of ImageOptions
    crop: Literal["resized", "random", "whole", "fit", "padded"]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    padding: int
    padding_mode: Literal["reflect", "constant"]
    views: int | Sequence[Mapping[str, Any]]
    eval_crop: Literal["center", "whole", "fit"]
    eval_ratio: float
    interpolation: Literal["bilinear", "bicubic", "nearest", "area"]
    flip: bool | Literal["alternating"]
    color_jitter: tuple[float, float, float]
    policy: Mapping[str, Any] | None
    cutout: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    on_error: Literal["raise", "skip"]
    verify: bool
    fields: Sequence[str] | Mapping[str, str | None]
    # end


class LoaderKeywords(ReadKeywords, ImageKeywords, total=False):
    """The options of `LoaderOptions` as keywords, for type checkers."""

    # keywords of LoaderOptions
    train: bool
    seed: int
    order: Literal["random", "quasi_random", "sequential"] | None
    drop_last: bool | None
    pad_last: bool
    dtype: torch.dtype
    rank: int | None
    world_size: int | None
    # end


def _ranks(rank: Any, world_size: Any) -> tuple[Any, Any]:
    """Return this process's rank and world size: as given, else those of torch.distributed's process group. A launched
    process must have joined its group: otherwise every rank would load all samples."""
    if (rank is None) != (world_size is None):
        raise DataError(
            f"rank={rank!r} and world_size={world_size!r}: pass both, or neither, to use those of torch.distributed's "
            "process group."
        )
    if rank is not None:
        return rank, world_size
    import torch.distributed as dist

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


def require_no_ranks() -> None:
    """Raise DataError in a process that has become one of several ranks since a loader was created: each of them would
    train on all samples, as in Lightning, whose ranks run the script and join their group in `fit`."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        raise DataError(
            f"The loader was created before this process became one of {ranks} ranks, so that each of them would train "
            "on all samples. Create it afterwards (in Lightning: in train_dataloader()), or pass rank= and world_size= "
            "(rank=0, world_size=1: all samples)."
        )


def _check_groups(views: Sequence[Mapping[str, Any]]) -> None:
    known = ("count", *(name for name, option in options_of(LoaderOptions).items() if PER_VIEW in option.marks))
    for group in views:
        for name in group:
            if name not in known:
                raise DataError(f"views: {name!r} cannot differ among views.{suggest(str(name), known)}")
        if not is_whole(group.get("count", 1), 1):
            raise DataError(f"views: count={group['count']!r} must be a positive integer.")


def fill_color(mean: Sequence[float], depth: int = 8) -> tuple[int, ...]:
    """Return the levels of that mean color, of `depth` bits; `mean` is for pixels scaled to 0–1."""
    most = (1 << depth) - 1
    return tuple(min(max(round(level * most), 0), most) for level in mean)


def odd_size(sample: str, height: int, width: int, image_size: ImageSize) -> DataError:
    return DataError(
        f"crop='padded' shifts full images, which must all have {size_text(image_size)} pixels (height × width); "
        f"{sample} has {height} × {width}. Use crop='resized'."
    )


def too_small(sample: str, height: int, width: int, image_size: ImageSize) -> DataError:
    return DataError(
        f"crop='random' cuts {size_text(image_size)} pixels (height × width) out of each image, but {sample} has "
        f"{height} × {width}. Use a smaller image_size, or crop='resized'."
    )


def check_sizes(
    settings: LoaderOptions, heights: NDArray[Any], widths: NDArray[Any], source: str,
    numbers: NDArray[Any],
) -> None:  # fmt: skip
    """Raise DataError for training images `(n,)` that a crop cannot take, of samples with these `numbers`."""
    height, width = settings.size
    if settings.shifts:
        wrong, error = (widths != width) | (heights != height), odd_size
    elif settings.crop == "random":
        wrong, error = (widths < width) | (heights < height), too_small
    else:
        return
    if wrong.any():
        at = int(wrong.argmax())
        raise error(f"sample {numbers[at]} of {source}", heights[at], widths[at], settings.image_size)


def check_workers(workers: Any, least: int = 1) -> int:
    """Return the number of threads or processes: as given, or for None one per available core."""
    if workers is None:
        from ..common import machine  # here: it imports psutil

        return machine.rank_cores()
    workers = plain(workers)
    check_whole("workers", workers, DataError, least, also=", or None for one per core")
    return int(workers)
