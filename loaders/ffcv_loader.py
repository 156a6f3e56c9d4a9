"""`FFCVLoader`: batches from a `.beton` file, decoded by FFCV's C library in threads of our own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import DataError
from . import libffcv
from .beton import open_beton
from .epochs import Batch, EpochLoader
from .machine import available_cores
from .settings import Settings, is_whole, make_settings


class FFCVLoader(EpochLoader):
    """Loads a `.beton` file, the same samples and pixels for any number of workers and ranks.

    Yields `(images, labels)`: images `(B, 3, H, W)` with channels-last strides, float32 normalised or
    uint8; labels `(B,)` int64 (classes) or float32 (targets). Each batch is memory of its own: keep it
    as long as you like.

    Order and augmentation are functions of (seed, epoch, sample index) only. Each `for` over the
    loader is one epoch; the next one moves on by itself, `set_epoch` chooses.

    Args:
        path: the file; it is validated before anything is decoded.
        batch_size: the *global* batch, over all ranks.
        image_size: side of the square images that come out, in pixels.
        train: random crop and flip; False: the centre, in order.
        seed: of order and augmentation.
        workers: threads; None: one per available core.
        order: `"random"` or `"sequential"`; None: random in training.
        drop_last: leave out a last batch that is not full.
        crop: in training, `"resized"` (Inception's random resized crop) or `"padded"` (the whole image
            shifted by up to `padding` pixels over its reflected edges; the usual choice for CIFAR).
        scale: share of the area a resized crop covers. (0.25, 1), as in ffcv-imagenet's recipes.
        ratio: its aspect ratio.
        padding: pixels of shift for the padded crop. 4, the usual choice for CIFAR's 32 pixels.
        eval_ratio: in evaluation, the crop's side over the image's shorter side. 224/256, the custom
            for ImageNet.
        flip: mirror every second training image.
        mean, std: of each channel, for pixels scaled to 0–1; ImageNet's.
        dtype: `torch.float32`, normalised; `torch.uint8`, as stored.
        indices: the samples to use; None: all.
        rank, world_size: this process's share of each batch (a contiguous slice).
        device: where the batches go; on a GPU they are copied from pinned memory without waiting.
        batches_ahead: batches in preparation while one is in use. 3, FFCV's default.

    Raises:
        BetonError: a file that cannot be used, or (while iterating) a sample that does not decode.
        DataError: an argument that cannot be used.
        MissingExtra: without FFCV.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        batch_size: int,
        image_size: int,
        train: bool = True,
        seed: int = 0,
        workers: int | None = None,
        order: str | None = None,
        indices: Any = None,
        device: torch.device | str = "cpu",
        batches_ahead: int = 3,
        **settings: Any,
    ) -> None:
        order = order or ("random" if train else "sequential")
        settings |= {"batch_size": batch_size, "image_size": image_size, "train": train, "seed": seed}
        if workers is not None and not is_whole(workers, 1):
            raise DataError(f"workers={workers!r} must be at least 1, or None for one per core.")
        if not is_whole(batches_ahead, 1):
            raise DataError(f"batches_ahead={batches_ahead!r} must be at least 1.")
        self.beton = open_beton(path)
        super().__init__(make_settings(order=order, **settings), indices, len(self.beton))
        self.workers = workers or available_cores()
        self.device = torch.device(device)
        self._ahead = batches_ahead
        self._kernel = _Kernel(self.beton, self.settings)
        self._pool: ThreadPoolExecutor | None = None
        self._copied: tuple[torch.device, torch.Tensor, torch.Tensor] | None = None

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        shares = self._shares(epoch)[start:]
        ahead: deque[_Pending] = deque()
        try:
            for number in range(len(shares)):
                while len(ahead) <= self._ahead and number + len(ahead) < len(shares):
                    ahead.append(self._submit(shares[number + len(ahead)], epoch))
                yield self._deliver(ahead.popleft().result())
        finally:
            for pending in ahead:
                pending.cancel()

    def _submit(self, indices: NDArray[np.int64], epoch: int) -> _Pending:
        """Starts loading a batch, in about two parts per worker so that no worker idles at its end."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="drivetrain-load")
        side = self.settings.image_size
        pinned = self.device.type == "cuda"
        pixels = torch.empty(len(indices), side, side, 3, dtype=torch.uint8, pin_memory=pinned)
        floats = None
        if self.settings.dtype == torch.float32 and not pinned:
            floats = torch.empty(len(indices), side, side, 3)
        step = max(-(-len(indices) // (2 * self.workers)), 1)
        parts = [
            self._pool.submit(self._kernel.load, indices, slice(at, at + step), epoch, pixels, floats)
            for at in range(0, len(indices), step)
        ]
        labels = torch.from_numpy(self._kernel.labels[indices])
        labels = labels.pin_memory() if pinned else labels
        return _Pending(parts, pixels if floats is None else floats, labels)

    def _deliver(self, batch: Batch) -> Batch:
        images, labels = batch
        images = images.permute(0, 3, 1, 2)
        if self.device.type == "cpu":
            return images, labels
        images = images.to(self.device, non_blocking=True)
        if self.settings.dtype == torch.float32:
            mean, std = self._statistics()
            images = images.float().sub_(mean).div_(std)
        return images, labels.to(self.device, non_blocking=True)

    def _statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of pixels 0–255 on the device, `(1, 3, 1, 1)`; copied there once."""
        if self._copied is None or self._copied[0] != self.device:
            both = torch.tensor([self.settings.mean, self.settings.std], device=self.device).mul_(255)
            self._copied = self.device, both[0].view(1, 3, 1, 1), both[1].view(1, 3, 1, 1)
        return self._copied[1:]

    @property
    def num_classes(self) -> int:
        """Number of classes of the data set."""
        return self.beton.num_classes

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


class _Pending:
    """A batch in preparation: its parts, and the memory they fill."""

    def __init__(self, parts: list[Future[None]], images: torch.Tensor, labels: torch.Tensor) -> None:
        self._parts, self._images, self._labels = parts, images, labels

    def result(self) -> Batch:
        """Waits for all parts; an exception in one of them is raised here."""
        for part in self._parts:
            part.result()
        return self._images, self._labels

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()


class _Kernel:
    """The compiled loading function, bound to a file and to settings."""

    def __init__(self, beton: Any, settings: Settings) -> None:
        libffcv.library()  # where FFCV or numba is missing, this names the extra
        from . import kernels  # compiles, or reads its cache: only where a loader is really made

        self._load, self._functions, self._beton = kernels.load_samples, kernels.functions(), beton
        self._reasons = {
            kernels.UNDECODABLE: "its JPEG data does not decode",
            kernels.WRONG_SIZE: "its JPEG header gives another size than the file's metadata",
        }
        self._seed = np.uint64(settings.seed)
        self._crop, self._scale = kernels.CENTER, (settings.eval_ratio, settings.eval_ratio)
        if settings.train and settings.crop == "resized":
            self._crop, self._scale = kernels.RANDOM_RESIZED, settings.scale
        elif settings.train:
            self._crop, self._scale = kernels.PADDED, (settings.padding, settings.padding)
            _check_padded_sizes(beton, settings.image_size)
        self._ratio = np.array(settings.ratio, dtype=np.float64)
        self._flip = 0.5 if settings.train and settings.flip else 0.0
        levels = np.arange(256, dtype=np.float32) / 255
        self._table = np.stack(
            [(levels - mean) / std for mean, std in zip(settings.mean, settings.std, strict=True)]
        ).astype(np.float32)
        is_class = beton.labels.dtype == np.int64
        self.labels = beton.labels if is_class else beton.labels.astype(np.float32)
        self._modes = beton.modes.astype(np.int32)
        self._largest = int((beton.widths.astype(np.int64) * beton.heights).max()) * 3
        self._local = threading.local()

    def load(
        self,
        indices: NDArray[np.int64],
        part: slice,
        epoch: int,
        pixels: torch.Tensor,
        floats: torch.Tensor | None,
    ) -> None:
        """Loads `indices[part]` into the same rows of `pixels`, and of `floats` if given."""
        chosen = np.ascontiguousarray(indices[part])
        beton, status = self._beton, np.empty(len(chosen), dtype=np.int32)
        if not hasattr(self._local, "scratch"):
            self._local.scratch = np.empty((1, self._largest), dtype=np.uint8)
        normalised = np.empty((0, 0, 0, 3), np.float32) if floats is None else floats[part].numpy()
        self._load(
            *self._functions, beton.data,
            self._modes, beton.widths, beton.heights, beton.pointers, beton.sizes,
            chosen, self._seed, np.uint64(epoch), self._crop,
            np.array(self._scale, dtype=np.float64), self._ratio, self._flip,
            self._local.scratch, pixels[part].numpy(), normalised, self._table, status,
        )  # fmt: skip
        if status.any():
            at = int(np.argmax(status))
            raise beton.sample_error(chosen[at], self._reasons[int(status[at])])


def _check_padded_sizes(beton: Any, image_size: int) -> None:
    odd = (beton.widths != image_size) | (beton.heights != image_size)
    if odd.any():
        at = int(np.argmax(odd))
        raise DataError(
            f"crop='padded' shifts whole images and needs all of them at {image_size} × {image_size} pixels; "
            f"sample {at} of {beton.path} has {beton.widths[at]} × {beton.heights[at]}. Use crop='resized'."
        )
