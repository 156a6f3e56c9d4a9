"""From a file's bytes to a batch's pixels: the work of each loader thread on its chunk of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ... import machine
from ...errors import BetonError, DataError
from ..beton.data_set import BetonFiles
from ..beton.layout import MODE_JPEG
from ..native import turbojpeg
from ..settings import Settings
from . import augmentation, draws, kernels, pixels
from .operations import Operations

_PART = 1 << 20  # bytes of pixels that a thread processes at a time: they stay in its cache
_METHODS = {"bilinear": kernels.BILINEAR, "area": kernels.AREA}


@dataclass
class _Workspace:
    """A thread's working memory: a decoder handle, and buffers for the largest image and a chunk's pixels.

    `readable` is the memory of `jpeg`, read-only.
    """

    handle: turbojpeg.Handle
    jpeg: NDArray[np.int8]
    readable: NDArray[np.uint8]
    scratch: NDArray[np.int8]
    sums: NDArray[np.uint16]
    rows: NDArray[np.uint8]
    columns: NDArray[np.uint32]
    small: NDArray[np.uint32]
    images: NDArray[np.uint8]


@dataclass(frozen=True)
class Job:
    """A batch to load: its samples, their augmentations, and the memory for the result.

    Attributes:
        indices: `(n,)` sample indices.
        keys: `(n,)` keys of their random draws; see `draws`.
        choices: the augmentations.
        images: `(n, side, side, 3)`, uint8 or already normalised.
    """

    indices: NDArray[np.int64]
    keys: NDArray[np.uint64]
    choices: augmentation.Choices
    images: torch.Tensor


class Decoder:
    """Loads chunks of batches from one data set with one set of settings; thread-safe.

    Raises:
        BetonError, DataError: if the file's images do not match the settings, or do not fit into memory.
    """

    def __init__(self, beton: BetonFiles, settings: Settings, operations: Sequence[Any]) -> None:
        self._beton, self._settings = beton, settings
        self._functions = kernels.functions()
        self._method = kernels.SHIFT if self._settings.shifts else _METHODS[settings.interpolation]
        self._operations = Operations(operations, settings.image_size)
        self._heights, self._widths = beton.heights.astype(np.int64), beton.widths.astype(np.int64)
        self._widest = int(self._widths.max())
        self._largest = int((self._heights * self._widths).max()) * 3  # bytes of pixels
        self._longest = int(beton.sizes[beton.modes == MODE_JPEG].max(initial=1))  # bytes of a JPEG
        self._modes = beton.modes.astype(np.int32)
        self._line, self._table = _normalisation(settings)
        self._fill = np.array([round(level * 255) for level in settings.mean], dtype=np.int64)
        self._augment = _policy_kernel(settings)
        self.part = max(_PART // (settings.image_size**2 * 3), 1)
        self._free: deque[_Workspace] = deque()

    @property
    def workspace_bytes(self) -> int:
        """Return the memory that each thread needs besides the batches, in bytes."""
        side, widest = self._settings.image_size, self._widest
        policy = 0 if self._augment is None else side * side * 18  # two pictures, and a sum in float32
        return (
            self._longest
            + self._largest
            + widest * (3 * side + 6 + 4 * side)
            + side * side * (4 + 3 * self.part)
            + policy
        )

    def choose(self, numbers: NDArray[np.int64], epoch: int, images: torch.Tensor) -> Job:
        """Return the job that loads the samples `numbers` `(n,)` of that epoch into `images`.

        A number is an index; each time that a sample is repeated in an epoch, its number is larger by the number of all
        samples.
        """
        settings = self._settings
        keys = draws.sample_keys(np.uint64(settings.seed), np.uint64(epoch), numbers)
        flips = None
        if settings.alternates:
            flips = augmentation.alternating(settings.seed, epoch, numbers)
        indices = numbers % len(self._beton)
        heights, widths = self._heights[indices], self._widths[indices]
        choices = augmentation.choose(settings, keys, heights, widths, flips)
        return Job(indices, keys, choices, images)

    def load(self, job: Job, part: slice) -> None:
        """Load one chunk of the batch.

        Raises:
            BetonError: naming the sample that cannot be decoded, or has changed since the conversion.
        """
        try:
            workspace = self._free.pop()
        except IndexError:
            workspace = self._make_workspace()
        try:
            self._load(workspace, job, part)
        finally:
            self._free.append(workspace)

    def _load(self, workspace: _Workspace, job: Job, part: slice) -> None:
        indices = np.ascontiguousarray(job.indices[part])
        self._beton.prepare(indices, verify=self._settings.verify)
        out = job.images[part]
        direct = out.dtype == torch.uint8
        images = out.numpy() if direct else workspace.images[: len(indices)]
        self._decode(workspace, indices, job.choices, part, images)
        if len(job.choices.color):
            pixels.jitter_color(images, job.choices.color[part])
        if job.choices.policy is not None:
            drawn = job.choices.policy
            self._augment(images, drawn.operations[part], drawn.magnitudes[part], drawn.weights[part])
        self._operations.apply(images, job.keys[part], indices)
        if len(job.choices.corners):
            pixels.cut_out(images, job.choices.corners[part], self._settings.cutout, self._fill)
        if out.dtype == torch.float32:
            pixels.normalise(images, self._line, out.numpy())
        elif not direct:
            pixels.look_up(images, self._table, out.view(torch.int16).numpy().view(np.uint16))

    def _decode(
        self,
        workspace: _Workspace,
        indices: NDArray[np.int64],
        choices: augmentation.Choices,
        part: slice,
        images: NDArray[np.uint8],
    ) -> None:
        beton, status = self._beton, np.empty(len(indices), dtype=np.int32)
        kernels.load_samples(
            *self._functions, workspace.handle.address, beton.descriptors,
            self._modes, beton.widths, beton.heights, beton.pointers, beton.sizes,
            indices, choices.boxes[part], choices.flips[part], self._method,
            workspace.jpeg, workspace.readable, workspace.scratch,
            workspace.sums, workspace.rows, workspace.columns, workspace.small,
            images, status,
        )  # fmt: skip
        if status.any():
            at = int(np.argmax(status))
            raise beton.sample_error(int(indices[at]), self._reason(int(indices[at]), int(status[at])))

    def _reason(self, index: int, status: int) -> str:
        if status == kernels.UNREADABLE:
            self._beton.stored(index)  # which raises the reason
            return "it cannot be read"
        if status == kernels.WRONG_SIZE:
            return "its JPEG header and the file's metadata disagree on the size"
        width, height = int(self._widths[index]), int(self._heights[index])
        message = turbojpeg.complaint(self._beton.stored(index), width, height)
        return (
            f"its JPEG data cannot be decoded ({message})" if message else "its JPEG data cannot be decoded"
        )

    def _make_workspace(self) -> _Workspace:
        side, widest = self._settings.image_size, self._widest
        jpeg = np.empty(self._longest, dtype=np.int8)
        readable = jpeg.view(np.uint8)
        readable.flags.writeable = False
        return _Workspace(
            handle=turbojpeg.Handle(),
            jpeg=jpeg,
            readable=readable,
            scratch=np.empty(self._largest, dtype=np.int8),
            sums=np.empty(max(3 * widest, 4 * side), dtype=np.uint16),
            rows=np.empty((side, 3 * widest), dtype=np.uint8),
            columns=np.empty((widest, side), dtype=np.uint32),
            small=np.empty((side, side), dtype=np.uint32),
            images=np.empty((self.part, side, side, 3), dtype=np.uint8),
        )

    def close(self) -> None:
        """Release the threads' memory and decoders. No thread may be loading."""
        while self._free:
            self._free.pop().handle.close()


def _policy_kernel(settings: Settings) -> Any:
    """Return the compiled operations of an augmentation policy, which take 6 s to compile the first time."""
    if not settings.train or settings.policy is None:
        return None
    from .policy_pixels import augment

    return augment


def _normalisation(settings: Settings) -> tuple[NDArray[np.float32], NDArray[np.uint16]]:
    """Return factor and summand of every byte of a line, `(2, 3 · side)`; and bfloat16 bits per level, `(3, 256)`."""
    mean, std = np.array(settings.mean), np.array(settings.std)
    line = np.stack(
        [np.tile(1 / (255 * std), settings.image_size), np.tile(-mean / std, settings.image_size)]
    )
    levels = (np.arange(256)[None] / 255 - mean[:, None]) / std[:, None]
    table = torch.from_numpy(levels).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return line.astype(np.float32), table


def check_memory(decoder: Decoder, batches: int, batch_bytes: int, workers: int) -> int:
    """Return the memory a loader needs, in bytes, for all batches and workers together.

    Raises:
        DataError: if this process may not allocate that much, with what to change.
        BetonError: if a single image is too large.
    """
    free, each = machine.rank_free_memory(), decoder.workspace_bytes
    need = batches * batch_bytes + workers * each
    if each > free:
        raise BetonError(
            f"The largest image of the file needs {each / 1e9:,.1f} GB to be decoded, but {free / 1e9:,.1f} GB are "
            "free. Convert the data with max_resolution=."
        )
    if need > free:
        raise DataError(
            f"The loader would need {need / 1e9:,.1f} GB ({batches} batches of {batch_bytes / 1e9:,.2f} GB, and "
            f"{workers} workers of {each / 1e9:,.2f} GB each), but only {free / 1e9:,.1f} GB are free. Use a smaller "
            "batch_size or image_size, batches_ahead=1, or fewer workers."
        )
    return need
