"""`FFCVLoader`: batches from a `.beton` file, decoded in threads of our own."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import DataError, require
from .beton.reader import Beton, open_beton
from .buffers import Buffers
from .device import DeviceFeed
from .epochs import Batch, EpochLoader
from .exhaustion import exhaustion, is_exhaustion
from .native import libffcv
from .settings import check_ahead, check_device, check_workers, make_settings

if TYPE_CHECKING:
    from .decode.decoder import Decoder


class FFCVLoader(EpochLoader):
    """Loads a `.beton` file, the same samples and pixels for any number of workers and ranks.

    Yields `(images, labels)`: images `(B, 3, H, W)` with channels-last strides, float32 or bfloat16
    normalised, or uint8; labels `(B,)` int64 (classes) or float32 (targets), or `(B, K)` float32 (vectors).
    Each batch is memory of its own: keep it as long as you like.

    Order and augmentation are functions of (seed, epoch, sample index) only. Each `for` over the
    loader is one epoch; the next one moves on by itself, `set_epoch` chooses.

    Args:
        path: the file; it is validated before anything is decoded.
        batch_size: the *global* batch, over all ranks.
        image_size: side of the square images that come out, in pixels; `set_image_size` changes it between
            epochs. A JPEG whose crop is at least twice as large is decoded at a half (a quarter, an eighth).
        train: random crop, flip and the rest; False: the centre, in order.
        seed: of order and augmentation.
        workers: threads; None: one per available core.
        order: `"random"`, `"sequential"`, or `"quasi_random"`, which mixes about 16 batches at a time, so that
            a file larger than the memory is read in long stretches; None: random in training.
        indices: the samples to use, as numbers or as a mask of booleans; None: all.
        device: where the batches go. A GPU gets bytes from pinned memory and normalises them, on a stream of its
            own, one batch ahead; nothing waits for it but the stream that is current when a batch is given out.
        batches_ahead: batches in preparation while one is in use. 3, FFCV's default.
        operations: further FFCV operations (`ffcv.transforms`), applied to the uint8 images of each sample
            after colours and before the cut-out square; their random numbers are seeded for each sample.

        drop_last: leave out a last batch that is not full; `dropped` is how many samples that are. None: in training
            on several ranks, so that their shares are equal. False, on several ranks: training repeats as few
            samples as make the shares equal, as torch's `DistributedSampler` does (`padded` is how many);
            evaluation gives each sample once, and a last batch of fewer samples than ranks joins the one before.
        pad_last: fill it up with the epoch's first samples; `padded` is how many are given twice.
        crop: in training, `"resized"` (Inception's random resized crop) or `"padded"` (the whole image
            shifted by up to `padding` pixels over its reflected edges; the usual choice for CIFAR).
        scale: share of the area a resized crop covers. (0.25, 1), as in ffcv-imagenet's recipes.
        ratio: its aspect ratio.
        padding: pixels of shift for the padded crop. 4, the usual choice for CIFAR's 32 pixels.
        eval_ratio: in evaluation, the crop's side over the image's shorter side. 224/256, the custom
            for ImageNet.
        interpolation: `"bilinear"`, antialiased, as Pillow and torchvision resize (within two levels where the
            JPEG is decoded whole, four where a raw image shrinks more than eightfold); or `"area"`, OpenCV's,
            with FFCV's own pixels bit for bit.
        flip: True: each training image is mirrored or not, at random in each epoch. `"alternating"`: at random in
            epoch 0, and the other way round in every odd one, so that two epochs show each image both ways
            (airbench's, arXiv:2404.00498, section 3.6; better where epochs are few). False: never.
        color_jitter: how far brightness, contrast and saturation of a training image may move from 1, each at
            random, as torchvision's `ColorJitter`. (0, 0, 0): not at all.
        policy: an augmentation policy for training images, after colours and before further operations:
            `{"name": "rand_augment", "num_ops": 2, "magnitude": 9, "num_magnitude_bins": 31}`,
            `{"name": "trivial_augment", "num_magnitude_bins": 31}` or
            `{"name": "aug_mix", "severity": 3, "width": 3, "depth": -1, "alpha": 1.0}`, each option may be left
            out. As torchvision's `RandAugment`, `TrivialAugmentWide` and `AugMix`. None: no policy.
        cutout: side, in pixels, of a square at a random place of a training image that is filled with `mean`
            (DeVries and Taylor 2017, arXiv:1708.04552). 0: none.
        mean, std: of each channel, for pixels scaled to 0–1; ImageNet's.
        dtype: `torch.float32` or `torch.bfloat16`, normalised; `torch.uint8`, as stored.
        fields: names of further fields of the file, yielded after the labels: a tensor for numbers and arrays,
            a list for bytes and JSON.
        verify: compare each sample with its CRC-32 in the manifest before it is used. False, because it costs
            time; `drivetrain verify` examines the whole file once.
        rank, world_size: this process's share of each batch (a contiguous slice). None: those of torch.distributed's
            process group, if there is one.

    Raises:
        BetonError: a file that cannot be used, or (while iterating) a sample that does not decode, or has
            changed since the conversion (`verify`).
        DataError: an argument that cannot be used, or settings that need more memory than there is.
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
        operations: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        order = order or ("random" if train else "sequential")
        settings |= {"batch_size": batch_size, "image_size": image_size, "train": train, "seed": seed}
        self.workers, self._device = check_workers(workers), check_device(device)
        self._ahead, self._operations = check_ahead(batches_ahead), tuple(operations)
        self.beton: Beton = open_beton(path)
        super().__init__(make_settings(order=order, **settings), indices, len(self.beton), self.beton)
        self._pool: ThreadPoolExecutor | None = None
        # Those in preparation, the one in use, and two to spare.
        self._buffers = Buffers(keep=self._ahead + 3)
        self._feed = self._make_feed()
        self._decoder = self._try_decoder()

    def _try_decoder(self) -> Decoder:
        """A decoder; a DataError where the system has too little memory for its tables."""
        try:
            return self._make_decoder()
        except Exception as error:
            if not is_exhaustion(error):
                raise
            raise exhaustion(error, self._wanted()) from error

    def _make_decoder(self) -> Decoder:
        require("numba", "ffcv", "load .beton files")
        libffcv.library()
        # Compiles, or reads its cache: only where a loader is made.
        from .decode.decoder import Decoder, check_memory

        decoder = Decoder(self.beton, self.settings, self._operations)
        each = 1 if self._feed is not None else self.settings.dtype.itemsize
        share = (
            -(-min(self.settings.batch_size, len(self.indices)) // self.settings.world_size)
            + self._last.joined
        )
        batch = share * self.settings.image_size**2 * 3 * each
        if self._feed is not None:
            batch = 1 << (batch - 1).bit_length()  # torch rounds pinned memory up
        self.memory = check_memory(decoder, self._ahead + 3, batch, self.workers)
        return decoder

    def set_image_size(self, image_size: int) -> None:
        """As `EpochLoader.set_image_size`; the JPEGs are decoded at the smaller size where that saves time."""
        before = self.settings
        super().set_image_size(image_size)
        try:
            self._decoder = self._try_decoder()
        except DataError:
            self.settings = before
            raise

    def _make_feed(self) -> DeviceFeed | None:
        if self.device.type == "cpu":
            return None
        own = self.settings
        return DeviceFeed(self.device, own.mean, own.std, None if own.dtype == torch.uint8 else own.dtype)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        ahead: deque[_Pending] = deque()
        batches = self._loaded(epoch, start, ahead)
        if self._feed is None:
            return batches
        return self._feed.deliver(batches, lambda: bool(ahead) and ahead[0].done())

    def _loaded(self, epoch: int, start: int, ahead: deque[_Pending]) -> Generator[Batch, None, None]:
        """The batches on the host; `ahead` has those in preparation."""
        shares = self._shares(epoch)[start:]
        try:
            for number in range(len(shares)):
                while len(ahead) <= self._ahead and number + len(ahead) < len(shares):
                    ahead.append(self._submit(shares[number + len(ahead)], epoch))
                yield self._batch(ahead.popleft().result(), shares[number])
        finally:
            for pending in ahead:
                pending.cancel()

    def _submit(self, indices: NDArray[np.int64], epoch: int) -> _Pending:
        """Starts loading a batch, in parts so small that no worker idles at its end."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="drivetrain-load")
        side = self.settings.image_size
        shape = len(indices), side, side, 3
        if self._feed is not None:
            images = self._feed.pinned(shape, torch.uint8)
        else:
            images = self._buffers.empty(shape, self.settings.dtype)
        job, decoder = self._decoder.choose(indices, epoch, images), self._decoder
        step = max(min(-(-len(indices) // (2 * self.workers)), decoder.part), 1)
        parts = [
            self._pool.submit(decoder.load, job, slice(at, at + step)) for at in range(0, len(indices), step)
        ]
        return _Pending(parts, images)

    def _batch(self, images: torch.Tensor, indices: NDArray[np.int64]) -> Batch:
        values = self._values(indices, (self.beton.label_name, *self.settings.fields))
        return images.permute(0, 3, 1, 2), *values

    @property
    def classes(self) -> list[str]:
        """Names of the classes in label order; empty if the file came without a manifest."""
        return self.beton.classes

    @property
    def labels(self) -> NDArray[Any]:
        """The labels of all samples of the file, `(N,)` or `(N, K)`."""
        return self.beton.labels

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._decoder.close()
        self._buffers.clear()


class _Pending:
    """A batch in preparation: its parts, and the memory they fill."""

    def __init__(self, parts: list[Future[None]], images: torch.Tensor) -> None:
        self._parts, self._images = parts, images

    def result(self) -> torch.Tensor:
        """Waits for all parts; an exception in one of them is raised here."""
        for part in self._parts:
            part.result()
        return self._images

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return all(part.done() for part in self._parts)

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()
