"""From a file's bytes to a batch's pixels: the work of each loader thread on its chunk of a batch."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common import machine
from ...common.errors import BetonError, DataError, require
from ..beton.data_set import BetonFiles
from ..beton.image_modes import RGB, channels_text
from ..beton.layout import MODE_JPEG
from ..beton.open_file import ChangedError, ReadError
from ..beton.tables import Rows
from ..native import jpegs, library
from ..native.stop import Stop, Stopped
from ..options import LoaderOptions, check_sizes, fill_color
from ..order.batches import Samples, taken
from . import augmentation, draws
from .augmentation import REPLACEMENT
from .moving import MovingTargets

if TYPE_CHECKING:
    from .operations import Operations

_PART = 1 << 20  # bytes of pixels that a thread processes at a time
_REPLACEMENTS = 8  # samples that are tried in the place of one that cannot be decoded
_METHODS = {
    "bilinear": library.BILINEAR, "bicubic": library.BICUBIC, "nearest": library.NEAREST, "area": library.AREA
}  # fmt: skip
_DTYPES = {torch.uint8: library.UINT8, torch.float32: library.FLOAT32, torch.bfloat16: library.BFLOAT16}


@dataclass(frozen=True)
class Draw:
    """The images of one size of a batch: `views` of each of n samples."""

    keys: NDArray[np.uint64]  # (n · views,), sample by sample; see `draws`
    choices: augmentation.Choices
    images: torch.Tensor  # (n, views, H, W, C), uint8 or already normalized: the memory for the result


@dataclass(frozen=True)
class BatchRequest:
    """A batch of n samples to load, and the images to make of them."""

    indices: NDArray[np.int64]
    rows: Rows
    keys: NDArray[np.uint64]
    draws: tuple[Draw, ...]  # one per group of views
    epoch: int
    among: Samples  # the samples that may take the place of one that cannot be decoded
    targets: dict[str, Any]  # by name, those that move with the images; see `MovingTargets.empty`
    stop: Stop = field(default_factory=Stop)
    # The samples that could not be decoded (on_error="skip"); `indices` has those in their places.
    replaced: list[int] = field(default_factory=list)


class Workspace:
    """A thread's working memory in the native core; it grows to what the largest sample needs. Not freed at interpreter
    exit: the system reclaims everything then, and a thread may still use it."""

    def __init__(self) -> None:
        self.address = library.library().dt_workspace_new()
        if self.address is None:
            raise MemoryError("There is no memory for another decoder.")
        self.close = weakref.finalize(self, library.library().dt_workspace_free, self.address)
        self.close.atexit = False


class Workspaces:
    """The working memory of all threads, lent to one at a time."""

    def __init__(self) -> None:
        self._free: deque[Workspace] = deque()

    @contextmanager
    def lend(self) -> Iterator[int]:
        try:
            workspace = self._free.pop()
        except IndexError:
            workspace = Workspace()
        try:
            yield workspace.address
        finally:
            self._free.append(workspace)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()


class Group:
    """How the images of one size are made of each sample: `views` of them, from number `first` on, as each view draws
    numbers of its own. `kind` is the number of channels and bits; `operations` are FFCV's."""

    def __init__(
        self, settings: LoaderOptions, first: int, views: int, operations: Sequence[Any], kind: tuple[int, int]
    ) -> None:  # fmt: skip
        self.settings, self._first, self.views = settings, first, views
        self.operations: Operations | None = None
        if operations:  # otherwise neither FFCV nor numba is imported
            require("numba", "ffcv", "use FFCV's operations")
            from .operations import Operations

            self.operations = Operations(operations, settings.size)
        channels, depth = kind
        line, table = self._tables = _normalization(settings, depth)
        method = _METHODS[settings.interpolation]
        if method == library.BILINEAR and not settings.train:
            method = library.PILLOW
        if settings.shifts:  # nothing is resized
            method = library.NEAREST if settings.pads else library.SHIFT
        pixel = np.array(fill_color(settings.mean, depth), dtype=f"<u{depth // 8}").tobytes()
        self.made = {
            dtype: library.Settings(
                *settings.size, method, number, channels, depth // 8, library.address(line[0]),
                library.address(line[1]), library.address(table), settings.cutout, (ctypes.c_uint8 * 8)(*pixel),
            )
            for dtype, number in _DTYPES.items()
        }  # fmt: skip

    def draw(
        self, keys: NDArray[np.uint64], numbers: NDArray[np.int64], epoch: int,
        sizes: tuple[NDArray[np.int64], NDArray[np.int64]], images: torch.Tensor,
    ) -> Draw:  # fmt: skip
        """Return what is drawn for the samples with these `keys`, `numbers` and stored `sizes`, each `(n,)`."""
        settings = self.settings
        flips = augmentation.alternating(settings.seed, epoch, numbers) if settings.alternates else None
        if self.views > 1 or self._first:
            keys = draws.view_keys(keys, self._first, self.views)
        heights, widths = (np.repeat(size, self.views) for size in sizes)
        return Draw(keys, augmentation.draw_choices(settings, keys, heights, widths, flips), images)

    def part(self, draw: Draw, samples: slice, images: torch.Tensor) -> _Part:
        rows = slice(samples.start * self.views, samples.stop * self.views)
        return _Part(self, _native(draw.choices, rows), draw.keys[rows], images)


@dataclass
class _Part:
    group: Group
    choices: library.Choices
    keys: NDArray[np.uint64]
    images: torch.Tensor

    def views(self) -> library.Views:
        made = self.group.made[self.images.dtype]
        choices = ctypes.pointer(self.choices)
        return library.Views(ctypes.pointer(made), choices, self.group.views, self.images.data_ptr())


class Decoder:
    """Loads chunks of batches from one data set with one set of settings; thread-safe."""

    def __init__(self, beton: BetonFiles, settings: LoaderOptions, operations: Sequence[Any]) -> None:
        self._beton, self._settings = beton, settings
        self._core = library.library()
        self.targets = MovingTargets(beton, settings)
        if operations and self.targets.kinds:
            raise DataError(
                f"The targets {', '.join(self.targets.kinds)} do not follow FFCV's operations, which may move pixels. "
                "Leave operations= out."
            )
        kind = beton.channels, beton.depth
        if operations and kind != RGB:
            raise DataError(
                f"operations= of FFCV take RGB with 8 bits, but the images of {beton.name} have "
                f"{channels_text(*kind)}. Leave them out."
            )
        self._pixel = beton.channels * beton.depth // 8  # bytes
        self._groups, first = list[Group](), 0
        for views, own in settings.groups:
            self._groups.append(Group(own, first, views, operations, kind))
            first += views
        known = beton.known
        self._largest = int((known.heights.astype(np.int64) * known.widths).max()) * self._pixel  # bytes of pixels
        self._longest = int(known.sizes[known.modes == MODE_JPEG].max(initial=1))  # bytes of a JPEG
        self.part = max(_PART // (self._pixel * settings.sample_pixels), 1)
        self.coefficient_bytes = library.MOST_MEMORY  # of a JPEG with several scans, for each thread
        self._workspaces = Workspaces()
        self.close = self._workspaces.close  # no thread may be loading

    def shapes(self, n: int) -> list[tuple[int, ...]]:
        """Return the shape of the images of n samples, `(n, views, H, W, C)`, for each group of views."""
        return [(n, group.views, *group.settings.size, self._beton.channels) for group in self._groups]

    @property
    def workspace_bytes(self) -> int:
        """The memory that each thread needs besides the batches, in bytes; without coefficients."""
        views = [
            library.Views(
                ctypes.pointer(group.made[torch.uint8]),
                None if group.settings.policy is None else ctypes.pointer(library.Choices()), 0, None,
            )
            for group in self._groups
        ]  # fmt: skip
        native = self._core.dt_workspace_bytes(
            self._samples(self._beton.known),
            len(self._beton.known),
            (library.Views * len(views))(*views),
            len(views),
        )
        # Besides the native core's: images for FFCV's operations, and one before it is placed.
        further = [
            self._pixel * prod(group.settings.size) * (
                (self.part * group.views if group.operations else 0)
                + (group.settings.pads or group.settings.active_crop == "fit")
            )
            for group in self._groups
        ]  # fmt: skip
        return int(native) + max(further)

    def _samples(self, rows: Rows) -> library.Samples:
        """Return the rows for the native core; they must live as long as it works with them."""
        columns = map(library.address, rows.columns)
        return library.Samples(*columns, self._beton.channels, self._beton.depth // 8)

    def request(
        self, numbers: NDArray[np.int64], epoch: int, images: Sequence[torch.Tensor],
        among: Samples, targets: dict[str, Any], stop: Stop | None = None,
    ) -> BatchRequest:  # fmt: skip
        """Return what loads the samples `numbers` `(n,)` of that epoch into `images`, one per group of views, and
        `targets`. A number is an index; the number of all samples is added for each repetition in an epoch."""
        keys, indices = draws.sample_keys(self._settings.seed, epoch, numbers), numbers % len(self._beton)
        rows = self._beton.rows(indices)
        sizes = rows.heights.astype(np.int64), rows.widths.astype(np.int64)
        if self._beton.lazy and self._settings.train:
            for group in self._groups:
                check_sizes(group.settings, *sizes, self._beton.name, indices)
        drawn = tuple(
            group.draw(keys, numbers, epoch, sizes, own) for group, own in zip(self._groups, images, strict=True)
        )
        return BatchRequest(indices, rows, keys, drawn, epoch, among, targets, stop or Stop())

    def load(self, request: BatchRequest, part: slice) -> None:
        """Load one chunk of the batch; errors name the sample. Raises Stopped if the request's flag is set."""
        with self._workspaces.lend() as workspace:
            if self._settings.on_error != "skip" or not self._settings.train:
                self._load(workspace, request, part)
            elif self._failure(workspace, request, part) is not None:  # of at least one of them
                for place in range(part.start, min(part.stop, len(request.indices))):
                    self._load_one(workspace, request, place)

    def _failure(self, workspace: int, request: BatchRequest, part: slice) -> BetonError | None:
        """Load one chunk; return the error of a sample that cannot be decoded."""
        try:
            self._load(workspace, request, part)
        except (ChangedError, ReadError):  # of the file, not of a sample
            raise
        except BetonError as error:
            return error
        return None

    def _load_one(self, workspace: int, request: BatchRequest, place: int) -> None:
        """Load a sample; for one that cannot be decoded another, drawn from its key: the same in any thread or rank."""
        alone = slice(place, place + 1)
        if (failure := self._failure(workspace, request, alone)) is None:
            return
        draw = draws.uniforms(request.keys[alone], REPLACEMENT, _REPLACEMENTS)[0]
        for number in taken(request.among, (draw * len(request.among)).astype(np.int64)):
            images = [draw.images[alone] for draw in request.draws]
            targets = {name: values[alone] for name, values in request.targets.items()}
            numbers = np.array([number])
            other = self.request(numbers, request.epoch, images, request.among, targets, request.stop)
            if self._failure(workspace, other, slice(0, 1)) is None:
                for name, values in targets.items():  # of a tensor in the same memory, of a list in a copy
                    request.targets[name][place] = values[0]
                request.replaced.append(int(request.indices[place]))
                request.indices[place] = number
                return
        raise failure

    def _load(self, workspace: int, request: BatchRequest, part: slice) -> None:
        part = slice(part.start, min(part.stop, len(request.indices)))
        indices = np.ascontiguousarray(request.indices[part])
        parts = [
            group.part(draw, part, draw.images[part]) for group, draw in zip(self._groups, request.draws, strict=True)
        ]
        rows = request.rows.part(part)
        with self._beton.prepared(indices):
            if self._groups[0].operations is None:
                self._decode(workspace, parts, indices, rows, request.stop)
            else:
                self._decode_and_operate(workspace, parts, indices, rows, request.stop)
        if self.targets.kinds:
            self.targets.load(request.targets, indices, request.draws[0].choices, part)

    def _decode_and_operate(
        self, workspace: int, parts: list[_Part], indices: NDArray[np.int64], rows: Rows, stop: Stop
    ) -> None:
        """Load the samples; apply FFCV's operations to their levels, before CutOut and the dtype."""
        levels = []
        for part in parts:
            choices = library.Choices.from_buffer_copy(part.choices)
            choices.corners = None
            images = part.images
            if images.dtype != torch.uint8:
                images = torch.empty(images.shape, dtype=torch.uint8, device="cpu")
            levels.append(_Part(part.group, choices, part.keys, images))
        self._decode(workspace, levels, indices, rows, stop)
        for part, level in zip(parts, levels, strict=True):
            images, group = level.images.flatten(0, 1), part.group
            assert group.operations is not None
            group.operations.apply(images.numpy(), part.keys, np.repeat(indices, group.views))
            made = group.made[part.images.dtype]
            self._core.dt_finish(made, part.choices, len(images), images.data_ptr(), part.images.data_ptr())

    def _decode(
        self, workspace: int, parts: list[_Part], indices: NDArray[np.int64], rows: Rows, stop: Stop,
        again: bool = False,
    ) -> None:  # fmt: skip
        status = np.empty(len(indices), dtype=np.int32)
        crcs = np.zeros(len(indices), dtype=np.uint32) if self._settings.verify else None
        views = (library.Views * len(parts))(*(part.views() for part in parts))
        places = np.arange(len(indices))  # in the rows
        self._core.dt_load(
            workspace, self._samples(rows), library.address(places), len(indices), views, len(parts),
            stop.limits(self.coefficient_bytes), library.address(crcs), status.ctypes.data,
        )  # fmt: skip
        if stop.is_set:
            raise Stopped("The loading of this batch was stopped: its loop has ended, or the loader was closed.")
        if crcs is not None and not self._beton.are_unchanged(indices, crcs):
            for index in indices.tolist():
                beton, own = self._beton.locate(index)
                beton.require_unchanged(own)  # raises; or has fetched a sample of a remote file again
            if not again:
                self._decode(workspace, parts, indices, rows, stop, again=True)
                return
        if status.any():
            at = int(np.argmax(status))
            error = self._error(int(indices[at]), int(status[at]), stop)
            if not isinstance(error, ReadError) or again:
                raise error
            self._decode(workspace, parts, indices, rows, stop, again=True)  # by now it could be read

    def _error(self, index: int, status: int, stop: Stop) -> Exception:
        if status == library.NO_MEMORY:
            return MemoryError(f"There is no memory to decode sample {index}.")
        beton, own = self._beton.locate(index)
        stored = beton.stored(own)  # raises the reason why a sample cannot be read
        if status == library.UNREADABLE:
            return ReadError(f"{beton.path}: sample {own} cannot be read. Check the disk that the file is on.")
        if status == library.WRONG_SIZE:
            return beton.sample_error(own, "its JPEG header and the file's metadata disagree on the size")
        limits = stop.limits(self.coefficient_bytes)
        message = jpegs.complaint(stored, int(beton.widths[own]), int(beton.heights[own]), limits)
        if status == library.TOO_LARGE:
            return DataError(
                f"{self._beton.name}: sample {index} cannot be decoded: {message}. Such a JPEG, progressive or in "
                "several scans, is decoded from all of its coefficients. Use fewer workers, or convert the data again: "
                "drivetrain convert recodes it without loss."
            )
        reason = f" ({message})" if message else ""
        return beton.sample_error(own, f"its JPEG data cannot be decoded{reason}")

    def require_memory(self, batches: int, batch_bytes: int, workers: int) -> int:
        """Return the memory in bytes that all batches and workers of a loader need, which must be free."""
        free, each = machine.rank_free_memory(), self.workspace_bytes
        need = batches * batch_bytes + workers * each
        self.coefficient_bytes = max(free - need, 0) // workers
        largest = self._longest + self._largest
        if largest > free:
            raise BetonError(
                f"The largest image of the file needs {largest / 1e9:,.1f} GB to be decoded, but {free / 1e9:,.1f} GB "
                "are free. Convert the data with max_resolution=."
            )
        if need > free:
            raise DataError(
                f"The loader would need {need / 1e9:,.1f} GB ({batches} batches of {batch_bytes / 1e9:,.2f} GB, and "
                f"{workers} workers of {each / 1e9:,.2f} GB each), but only {free / 1e9:,.1f} GB are free. Use a "
                "smaller batch_size or image_size, batches_ahead=1, or fewer workers."
            )
        return need


def _native(choices: augmentation.Choices, part: slice) -> library.Choices:
    of = library.Choices(
        boxes=library.address(choices.boxes[part]), flips=library.address(choices.flips[part]),
        colors=library.address(choices.color[part]), corners=library.address(choices.corners[part]),
        places=None if choices.places is None else library.address(choices.places[part]),
    )  # fmt: skip
    if (drawn := choices.policy) is not None:
        of.chains, of.steps = drawn.operations.shape[1:]
        of.operations = library.address(drawn.operations[part])
        of.magnitudes = library.address(drawn.magnitudes[part])
        of.weights = library.address(drawn.weights[part])
    return of


def _normalization(settings: LoaderOptions, depth: int) -> tuple[NDArray[np.float32], NDArray[np.uint16]]:
    """Return factor and summand of every value of a line, `(2, C · W)`; and bfloat16 bits per byte, `(C, 256)`."""
    mean, std = np.array(settings.mean), np.array(settings.std)
    line = np.tile(np.stack([1 / (((1 << depth) - 1) * std), -mean / std]), settings.size[1])
    levels = (np.arange(256)[None] / 255 - mean[:, None]) / std[:, None]
    table = torch.from_numpy(levels).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return line.astype(np.float32), table
