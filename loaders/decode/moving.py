"""Targets that move with the image: masks, boxes and keypoints, cropped, resized and mirrored as its pixels were; they
equal those of torchvision's v2 transforms on `tv_tensors` with the same draws."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.errors import BetonError, DataError
from ..beton.data_set import BetonFiles
from ..beton.targets import NOT_COUNTED, STORED_AS, coordinates, nearest_places
from ..options import LoaderOptions
from .augmentation import Choices, draw_choices
from .policies import STILL

_NARROW = 255  # the largest class index of a uint8 mask
_TRIED = 8  # samples that are tried to find out what the masks are


@dataclass(frozen=True)
class Motion:
    # Top, left, height and width of the crop, in pixels of the stored image; with `shifts`, rows and columns by which
    # the full image is shifted, and its size.
    box: tuple[int, int, int, int]
    place: tuple[int, int, int, int]  # top, left, height and width of where the crop goes in the output
    size: tuple[int, int]  # of the output
    flip: bool  # of the output, at last
    shifts: bool  # of the full image over its reflected edges

    @property
    def rows(self) -> int | None:
        """How many rows of the stored image, from its top, the crop needs; None: all."""
        return None if self.shifts else self.box[0] + self.box[2]

    def mask(self, mask: NDArray[Any]) -> NDArray[Any]:
        """Return class indices `(h, w)` as `(H, W)`: the nearest ones, and 255 where there is no image."""
        rows, columns = (self._line(axis) for axis in range(2))
        if self.flip:
            columns = columns[::-1]
        moved: NDArray[Any] = mask[rows][:, columns]
        if self.place[2:] != self.size:
            moved[rows < 0] = NOT_COUNTED
            moved[:, columns < 0] = NOT_COUNTED
        return moved

    def back(self, mask: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
        """Return class indices `(H, W)` of an image in evaluation as those of its source `(h, w)` of this size: the
        nearest ones, and 255 outside of the crop."""
        found = np.full(size, NOT_COUNTED, mask.dtype)
        (top, left, height, width), (first, begin, rows, columns) = self.box, self.place
        shown = mask[first : first + rows, begin : begin + columns]
        found[top : top + height, left : left + width] = shown[nearest_places(rows, height)][
            :, nearest_places(columns, width)
        ]
        return found

    def _line(self, axis: int) -> NDArray[np.int64]:
        """Return the source row (or column) of each output row (or column); -1 where there is none."""
        start, length, size = self.box[axis], self.box[axis + 2], self.size[axis]
        first, extent = self.place[axis], self.place[axis + 2]
        line: NDArray[np.int64] = np.full(size, -1)
        if self.shifts:
            line = np.abs(np.arange(size) - start)
            return np.minimum(line, 2 * (size - 1) - line)
        line[first : first + extent] = start + nearest_places(length, extent)
        return line

    def boxes(self, boxes: NDArray[Any]) -> NDArray[np.float32]:
        """Return boxes `(n, 4)` (left, top, right, bottom) in pixels of the output, cut at the crop's edges. A box
        outside of the crop has no area then, and stays, so that what belongs to boxes by number still does."""
        corners = boxes.astype(np.float32).reshape(-1, 2, 2) - _floats(self.box[1], self.box[0])
        corners = self._scaled(np.clip(corners, 0, _floats(self.box[3], self.box[2])))
        if self.flip:
            corners[:, :, 0] = np.float32(self.size[1]) - corners[:, ::-1, 0]
        return corners.reshape(-1, 4)

    def keypoints(self, points: NDArray[Any]) -> NDArray[np.float32]:
        """Return points `(n, 2)` (x, y) in pixels of the output; those outside of the crop are outside of it."""
        moved = self._scaled(points.astype(np.float32) - _floats(self.box[1], self.box[0]))
        if self.flip:  # the center of a pixel goes to that of its mirror image
            moved[:, 0] = np.float32(self.size[1] - 1) - moved[:, 0]
        return moved

    def _scaled(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        ratios = _floats(self.place[3] / self.box[3], self.place[2] / self.box[2])
        return points * ratios + _floats(self.place[1], self.place[0])


def _floats(x: float, y: float) -> NDArray[np.float32]:
    return np.array([x, y], dtype=np.float32)


class Masks:
    """The masks of a field, all in one dtype: uint8, or int32 if there may be class indices above 255. The number of
    classes decides, or the first mask that is intact: a sample whose mask is damaged may be excluded, or skipped."""

    def __init__(self, beton: BetonFiles, name: str) -> None:
        self._beton, self._name = beton, name
        wide = name == beton.label_name and len(beton.classes) > _NARROW + 1
        self.dtype = torch.int32 if wide or self._first().dtype != np.uint8 else torch.uint8

    def _first(self) -> NDArray[Any]:
        failure: BetonError | None = None
        for index in range(min(len(self._beton), _TRIED)):
            try:
                return self._read(index)
            except BetonError as error:
                failure = failure or error
        assert failure is not None
        raise failure  # of none of them: the field has no masks

    def _read(self, index: int, rows: int | None = None) -> NDArray[Any]:
        beton, own = self._beton.locate(index)
        return beton.mask(self._name, own, rows)

    def __call__(self, index: int, motion: Motion | None = None) -> NDArray[Any]:
        mask = self._read(index, None if motion is None else motion.rows)
        moved = mask if motion is None else motion.mask(mask)
        if self.dtype == torch.int32:
            return moved.astype(np.int32)
        if mask.dtype != np.uint8 and mask.max() > _NARROW:  # of all of it, so that no crop decides
            beton, own = self._beton.locate(index)
            how = "with classes=, one name per class index"
            if self._name != beton.label_name:  # whose indices have names
                how = "with another first sample, whose mask has an index above 255, too"
            raise beton.sample_error(
                own, f"its mask {self._name!r} has the class index {mask.max()}, but the first sample's has 8 bits per "
                f"pixel. Convert the data {how}",
            )  # fmt: skip
        return moved.astype(np.uint8, copy=False)


class MovingTargets:
    """The label and fields that move with a loader's images: those whose kind the options or the manifest give."""

    def __init__(self, beton: BetonFiles, settings: LoaderOptions) -> None:
        self._beton, self._settings = beton, settings
        self.kinds = moving_fields(beton, settings)
        check_motion(self.kinds, settings)
        self._masks = {name: Masks(beton, name) for name, kind in self.kinds.items() if kind == "mask"}

    @property
    def sample_bytes(self) -> int:
        height, width = self._settings.size
        return height * width * sum(masks.dtype.itemsize for masks in self._masks.values())

    def empty(self, n: int, memory: Any) -> dict[str, Any]:
        """Return what `load` fills for n samples, by name: a tensor `(n, H, W)` for masks, which `memory` returns for a
        shape and a dtype, else a list."""
        shape = (n, *self._settings.size)
        return {
            name: memory(shape, self._masks[name].dtype) if kind == "mask" else [None] * n
            for name, kind in self.kinds.items()
        }

    def load(self, into: dict[str, Any], indices: NDArray[np.int64], choices: Choices, part: slice) -> None:
        moved = list(motions(self._settings, choices, part))
        for name, kind in self.kinds.items():
            stored = indices if kind == "mask" else self._beton.read(name, indices)
            rows = zip(stored, indices.tolist(), moved, strict=True)
            for place, (values, index, motion) in enumerate(rows, part.start):
                masks = self._masks.get(name)
                one = masks(index, motion) if masks else self._points(name, kind, index, values, motion)
                into[name][place] = torch.from_numpy(one)

    def evaluated(self, indices: NDArray[np.int64]) -> dict[str, Any]:
        """Return those of the samples `indices` `(n,)` in evaluation, for which nothing is drawn, by name."""
        into = self.empty(len(indices), lambda shape, dtype: torch.empty(shape, dtype=dtype, device="cpu"))
        rows = self._beton.rows(indices)
        heights, widths = rows.heights.astype(np.int64), rows.widths.astype(np.int64)
        choices = draw_choices(self._settings, np.zeros(len(indices), np.uint64), heights, widths)
        self.load(into, indices, choices, slice(0, len(indices)))
        return into

    def _points(self, name: str, kind: str, index: int, values: Any, motion: Motion) -> NDArray[np.float32]:
        try:
            points = coordinates(kind, values)
        except ValueError as error:
            beton, own = self._beton.locate(index)
            raise beton.sample_error(own, f"its {name!r}: {error}") from None
        return motion.boxes(points) if kind == "boxes" else motion.keypoints(points)


def motions(settings: LoaderOptions, choices: Choices, part: slice) -> Iterator[Motion]:
    """Yield what becomes of the pixels of a part of the images that were chosen for."""
    size, shifts = settings.size, settings.shifts and choices.places is None
    boxes, flips = choices.boxes[part].tolist(), choices.flips[part].tolist()
    places = [(0, 0, *size)] * len(boxes) if choices.places is None else choices.places[part].tolist()
    for box, place, flip in zip(boxes, places, flips, strict=True):
        yield Motion(tuple(box), tuple(place), size, flip, shifts)


def moving_fields(beton: BetonFiles, settings: LoaderOptions) -> dict[str, str]:
    """Return the fields of a batch that move with the images, the label among them: name to kind."""
    kinds: dict[str, str | None] = dict(beton.targets)
    if isinstance(settings.fields, Mapping):
        kinds |= settings.fields
    moving = {}
    for name in (beton.label_name, *settings.fields):
        if (kind := kinds.get(name)) is not None and name in beton.fields:  # others: see `check_contents`
            if beton.fields[name] != STORED_AS[kind]:
                raise DataError(
                    f"fields={{{name!r}: {kind!r}}}: {name!r} is stored as {beton.fields[name]}, but {kind} are stored "
                    f"as {STORED_AS[kind]}. Leave the kind out, or convert the data with it."
                )
            moving[name] = kind
    return moving


def check_motion(kinds: Mapping[str, str], settings: LoaderOptions) -> None:
    """Raise DataError for settings that move pixels in a way that the targets do not follow."""
    what = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items())
    points = any(kind != "mask" for kind in kinds.values())
    if not kinds:
        return
    if settings.has_views:
        setting, remedy = f"views={settings.views!r:.80}", "Leave views out"
    elif settings.train and settings.policy is not None and settings.policy["name"] not in STILL:
        setting = f"policy={dict(settings.policy)!r:.80}"
        remedy = "Leave the policy out; color_jitter and three_augment do not move pixels"
    elif points and settings.shifts and not settings.pads:
        setting, remedy = "crop='padded' over reflected edges", "Use padding_mode='constant'"
    else:
        return
    raise DataError(f"The targets {what} do not follow {setting}. {remedy}.")
