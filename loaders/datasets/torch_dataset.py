"""The data sets of `TorchLoader`, and torchvision's transforms that match `FFCVLoader`'s in training."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder, VisionDataset
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2

from ...common.errors import DataError
from ...common.storage.cache import Remote
from ..beton.data_set import BetonFiles, open_files
from ..beton.image_modes import RGB, mode_of
from ..beton.open_file import Identity
from ..beton.targets import NOT_COUNTED
from ..conversion.folders import FolderSource, refuse_odd_names, without_waiting
from ..decode.augmentation import fitted
from ..decode.moving import Masks
from ..decode.pictures import decoded, pixels_of, rgb_of, to_rgb
from ..decode.policies import torchvision_policy
from ..decode.preprocess import Evaluation
from ..options import LoaderOptions, fill_color, odd_size, too_small
from ..sources import Files, Source, files_of

_LOCAL = Remote()


class BetonDataset(VisionDataset):  # type: ignore[misc]
    """`.beton` files as a torchvision data set: PIL decodes, `transform` makes an element of a batch. With `verify`,
    each sample is compared with its CRC-32 in the manifest."""

    def __init__(self, source: Source, transform: Any = None, verify: bool = False, remote: Remote = _LOCAL) -> None:
        super().__init__(str(files_of(source)), transform=transform)
        self._source, self._remote, self._verify = files_of(source), remote, verify
        self._beton: BetonFiles | None = None
        self._identities: list[Identity] | None = None
        self.classes = self.beton.classes

    @cached_property
    def masks(self) -> Masks | None:
        beton = self.beton
        return Masks(beton, beton.label_name) if beton.label_name in beton.targets else None

    @property
    def beton(self) -> BetonFiles:
        if self._beton is None:
            opened = open_files(self._source, self._remote)
            if self._identities is not None:
                opened.require_identities(self._identities)
            # Set last: a worker continues after an error, and must not read from a file that was rejected.
            self._beton, self._identities = opened, list(opened.identities)
        return self._beton

    def __getstate__(self) -> dict[str, Any]:
        # Each worker process opens the file itself; it must be the same file.
        return {name: value for name, value in self.__dict__.items() if name != "masks"} | {"_beton": None}

    def __len__(self) -> int:
        return len(self.beton)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        beton = self.beton
        file, own = beton.locate(index)
        if self._verify or beton.remote:
            file.require_unchanged(own)
        # Others as arrays: Pillow resizes colors by their opacity, and does not filter 16 bits.
        pillow = mode_of(beton.channels, beton.depth) in ("RGB", "L")
        image = file.image(own) if pillow else file.pixels(own)
        if self.masks is not None:
            mask = tv_tensors.Mask(torch.from_numpy(self.masks(index).copy()))
            image, mask = (image, mask) if self.transform is None else self.transform(image, mask)
            return image, mask.as_subclass(torch.Tensor)
        label = beton.read(beton.label_name, np.array([index]))[0]
        label = label.item() if label.ndim == 0 else torch.from_numpy(label)
        return (image if self.transform is None else self.transform(image)), label


class PictureFolder(ImageFolder):  # type: ignore[misc]
    """torchvision's ImageFolder with the classes and files that `convert` uses: no hidden ones."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        self._source = FolderSource(Path(directory))
        refuse_odd_names(self._source.classes)
        return self._source.classes, {name: label for label, name in enumerate(self._source.classes)}

    def make_dataset(self, *_: Any, **__: Any) -> list[tuple[str, int]]:
        """Return `(path, label)` of each sample in the folder that `find_classes` was called with."""
        source = self._source
        del self._source  # otherwise each worker process would receive it
        return source.listed()


def open_picture(path: str) -> Any:
    """Open an image file as `convert` does: upright, and in RGB."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            data = file.read()
        with decoded(data) as (image, _):
            return to_rgb(image)[0]
    except DataError as error:  # in which the loader does not look for the sample's name
        raise ValueError(f"{path}: {error}") from error


def open_dataset(source: Any, transform: Any, verify: bool, remote: Remote = _LOCAL) -> Any:
    """Return an ImageFolder tree, a `.beton` file or the given torchvision data set, with this transform."""
    if not isinstance(source, str | Path | Mapping | Files):
        if not hasattr(source, "transform") or not hasattr(source, "__len__"):
            raise DataError(
                f"A {type(source).__name__} cannot be loaded. Pass a folder, a .beton file or a torchvision data set "
                "(with `transform` and len())."
            )
        own = copy.copy(source)  # another loader of the same data set has a transform of its own
        set_transform(own, transform)
        return own
    if isinstance(source, str | Path) and Path(source).is_dir():
        return PictureFolder(str(source), transform=transform, loader=open_picture)
    return BetonDataset(source, transform, verify, remote)


def set_transform(dataset: Any, transform: Any) -> None:
    """Make a data set apply a transform to its images. Some of torchvision's apply `transforms`, which has both that
    and their transform of labels."""
    dataset.transform = transform
    if hasattr(dataset, "transforms"):
        dataset.transforms = StandardTransform(transform, getattr(dataset, "target_transform", None))


def make_transform(settings: LoaderOptions, depth: int = 8) -> Any:
    """Return torchvision's equivalent of `FFCVLoader`'s processing, from an image of `BetonDataset` to a tensor, or to
    views; in evaluation, what makes the same pixels. `depth`: bits of the images."""
    if not settings.train:
        return Evaluation(settings, depth)
    with torch.device("cpu"):  # some of torchvision's have tensors
        if not settings.has_views:
            return _transform(settings, depth)
        groups = [partial(_views, count, _transform(own, depth)) for count, own in settings.groups]
    return groups[0] if isinstance(settings.views, int) else partial(_each, groups)


def _transform(settings: LoaderOptions, depth: int) -> Any:
    fill: tuple[float, ...] = fill_color(settings.mean, depth)
    if depth == 16:  # tensors of floats from 0 to 1
        fill = tuple(level / 0xFFFF for level in fill)
    kind = len(settings.mean), depth
    read = _on_image(_pillow_to_rgb) if kind == RGB else _on_image(_pixels_to_tensor, mode_of(*kind))
    steps = [read, *_crop(settings, fill)]
    if depth == 16:  # as those of bytes are: bicubic weights are partly negative
        steps.append(_on_image(partial(torch.clamp, min=0, max=1)))
    if settings.flip is True:  # the loader, which knows the epoch, does alternating flips
        steps.append(v2.RandomHorizontalFlip())
    if any(settings.color_jitter):
        steps.append(v2.ColorJitter(*settings.color_jitter))
    if settings.policy is not None:
        policy = torchvision_policy(settings.policy)
        steps.append(_on_image(policy) if isinstance(policy, partial) else policy)
    steps.append(v2.PILToTensor())
    if settings.cutout:
        steps.append(_on_image(_cut_out, settings.cutout, torch.tensor(fill).view(-1, 1, 1)))
    if settings.dtype != torch.uint8:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(settings.mean, settings.std)]
        steps.append(v2.ToDtype(settings.dtype))
    return v2.Compose(steps)


def _crop(settings: LoaderOptions, fill: tuple[float, ...]) -> list[Any]:
    size, filter_ = settings.size, v2.InterpolationMode(settings.interpolation)
    if filter_ == v2.InterpolationMode.NEAREST:  # of tensors, Pillow's; of Pillow's images the same
        filter_ = v2.InterpolationMode.NEAREST_EXACT
    if settings.crop == "whole":
        return [v2.Resize(size, filter_)]
    if settings.crop == "fit":
        return [Fit(size, filter_, fill)]
    if settings.crop == "resized":
        return [v2.RandomResizedCrop(size, settings.scale, settings.ratio, filter_)]
    if settings.crop == "random":
        return [_on_image(_require_size, size, True), v2.RandomCrop(size)]
    padding: dict[str, Any] = {"padding": settings.padding or None, "padding_mode": settings.padding_mode}
    if settings.pads:
        padding["fill"] = {"others": fill, tv_tensors.Mask: NOT_COUNTED}
    return [_on_image(_require_size, size, False), v2.RandomCrop(size, **padding)]


def _on_image(function: Callable[..., Any], *options: Any) -> Callable[..., Any]:
    """Return a transform that applies a function to the image; masks pass through."""
    return partial(_apply, partial(function, *options))


def _apply(function: Callable[[Any], Any], image: Any, *masks: Any) -> Any:
    changed = function(image)
    return (changed, *masks) if masks else changed


def _pillow_to_rgb(image: Any) -> Any:
    if not isinstance(image, Image.Image):
        return image
    try:
        return rgb_of(image)
    except DataError as error:  # in which the loader does not look for the sample's name
        raise ValueError(str(error)) from error


def _pillow_of_mode(mode: str, image: Image.Image) -> Any:
    """Return an upright image of the mode, as evaluation has it."""
    if image.mode == mode and not image.info and type(image) is Image.Image:
        return image
    try:
        return Image.fromarray(pixels_of(image, mode)[0])
    except DataError as error:  # in which the loader does not look for the sample's name
        raise ValueError(str(error)) from error


def _pixels_to_tensor(mode: str, image: Any) -> Any:
    """Make tensors `(C, H, W)` of arrays: uint8, or of 16 bits float32 from 0 to 1. PIL images get this mode."""
    if isinstance(image, Image.Image):
        image = _pillow_of_mode(mode, image)
        if mode == "RGBA":  # whose colors Pillow would weigh by their opacity
            image = np.asarray(image)
    if not isinstance(image, np.ndarray):
        return image
    planes = image[None] if image.ndim == 2 else np.moveaxis(image, -1, 0)
    if image.dtype == np.uint8:
        return torch.from_numpy(planes.copy())
    return torch.from_numpy(planes.astype(np.float32)) / 0xFFFF


def _require_size(size: tuple[int, int], at_least: bool, image: Any) -> Any:
    height, width = v2.functional.get_size(image)
    if at_least and (height < size[0] or width < size[1]):
        raise too_small("one image", height, width, size)
    if not at_least and (height, width) != size:
        raise odd_size("one image", height, width, size)
    return image


def _cut_out(side: int, fill: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Fill a square inside an image `(C, H, W)` with the color `fill` `(C, 1, 1)`, as `FFCVLoader` does."""
    image = image.clone()  # it may be a view of what the data set keeps
    top, left = (int(torch.randint(size - side + 1, ())) for size in image.shape[1:])
    image[:, top : top + side, left : left + side] = fill
    return image


@dataclass(frozen=True)
class Fit:
    """Scale images, and their masks, into this height and width, and pad them with the color `fill`, and with 255."""

    size: tuple[int, int]
    interpolation: v2.InterpolationMode
    fill: tuple[float, ...]

    def __call__(self, image: Any, *masks: Any) -> Any:
        own_height, own_width = v2.functional.get_size(image)
        (place,) = fitted(np.array([own_height]), np.array([own_width]), self.size)
        top, left, height, width = map(int, place)
        edges = [left, top, self.size[1] - left - width, self.size[0] - top - height]
        resized = v2.functional.resize(image, [height, width], self.interpolation)
        padded = v2.functional.pad(resized, edges, fill=list(self.fill))
        if not masks:
            return padded
        nearest = v2.InterpolationMode.NEAREST
        moved = (v2.functional.resize(mask, [height, width], nearest) for mask in masks)
        return (padded, *(v2.functional.pad(mask, edges, fill=NOT_COUNTED) for mask in moved))


def _views(count: int, transform: Callable[[Any], torch.Tensor], image: Any) -> torch.Tensor:
    """Make several tensors of an image, each with draws of its own, `(V, C, H, W)`."""
    return torch.stack([transform(image) for _ in range(count)])


def _each(transforms: Sequence[Callable[[Any], torch.Tensor]], image: Any) -> tuple[torch.Tensor, ...]:
    return tuple(transform(image) for transform in transforms)
