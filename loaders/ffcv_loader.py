"""`FFCVLoader`: batches from `.beton` files, decoded in Drivetrain's own threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.errors import DataError
from ..common.exhaustion import exhaustion, is_exhaustion
from ..common.signals import interrupts_held
from ..common.storage.addresses import PATIENCE
from ..common.storage.cache import Remote
from ..common.threads import end, results
from .beton.data_set import BetonFiles, open_files
from .decode.buffers import Buffers
from .decode.decoder import BatchRequest, Decoder
from .device import feed_of
from .epochs import Batch, EpochLoader
from .image_size import ImageSize
from .native.stop import Stop
from .options import Settings, check_ahead, check_device, check_workers, make_settings
from .sources import Source

_FEWEST = 64
_CHUNK = 1 << 20
"""Bytes that a chunk reads and writes, at least: starting one takes as long as ten images of 32 pixels."""


class FFCVLoader(EpochLoader):
    """Load a `.beton` file, or several; samples and pixels do not depend on the number of workers and ranks.

    Yields `(images, labels)`: images `(B, C, H, W)` (several per sample: `views`) with channels-last strides; C is 3,
    or 1 or 4 for files converted with `image_mode`;
    normalised float32 or bfloat16, or uint8; labels `(B,)` int64 (class indices) or float32 (targets), or `(B, K)`
    float32 (vectors). Each batch has its own memory, so you can keep it.

    Of a JPEG only the crop is decoded; damage outside of it is noticed by `verify=True`, or `drivetrain verify`.

    Order and augmentation depend only on (seed, epoch, sample index). Each `for` loop over the loader is one epoch; the
    next loop is the next epoch, unless `set_epoch` selects another.

    Args:
        source: the file, or its address, such as `s3://bucket/train.beton`; it is validated before anything is decoded.
            A pattern such as `train-{000..127}.beton` stands for several files that are one data set, whose samples are
            numbered through in this order. A dict of sources and weights, `{"photos.beton": 3, "scans.beton": 1}`, is a
            mix: an epoch has as many samples as all of them together, and of each data set its share by weight; see
            `order.mixed`. Files of a data set, and of a mix, have the same fields and classes.
        batch_size: the *global* batch size, over all ranks.
        image_size: side of square output images, or height and width, in pixels; `set_image_size` changes it between
            epochs. In training, a JPEG with a crop at least twice as large is decoded at half (a quarter, an eighth) of
            its size; see `interpolation`.
        train: True for random crops, flips and the other augmentations; False for `eval_crop`, in order. Default True.
        seed: of order and augmentation. Default 0.
        workers: number of threads. Default None: one per available core.
        order: `"random"`, `"sequential"`, or `"quasi_random"`, which mixes about 16 batches at a time, so that a file
            larger than the memory is read in long runs. Default None: random in training, else sequential.
        indices: the samples to use, as indices or as a boolean mask. Default None: all.
        device: where the batches go. Bytes are copied to a GPU from pinned memory and normalised there on a separate
            stream, one batch ahead; only the stream that is current when a batch is yielded waits for it.
        batches_ahead: number of batches in preparation while one is in use. Default 3, as in FFCV.
        operations: further FFCV operations (`ffcv.transforms`), applied to the uint8 images of each sample after the
            colour operations and before CutOut; their random numbers are seeded for each sample.
        cache, cache_limit, patience: of files at an address: the folder of their local copies, the GB that it may take,
            and the seconds for which a server that does not answer is waited for; see `remote.cache.Remote`. Default:
            None, None and five minutes.
        drop_last: drop a last batch that is not full; `dropped` is the number of samples. Default None: True in
            training on several ranks, so that their shards are equal. With False, training on several ranks repeats
            the fewest samples that make the shards equal, as torch's `DistributedSampler` does (`padded` is their
            number); evaluation yields each sample once, and a last batch with fewer samples than ranks is merged into
            the previous one.
        pad_last: fill up the last batch with the epoch's first samples; `padded` is the number of repeated samples.
        crop: in training, `"resized"` (Inception's random resized crop), `"random"` (a place in the image, in its own
            resolution: torchvision's `RandomCrop`), `"whole"` and `"fit"` (as `eval_crop`), or `"padded"` (the full
            image shifted by up to `padding` pixels; the usual choice for CIFAR).
        scale: fraction of the area that a resized crop covers. Default (0.25, 1), as in ffcv-imagenet's recipes.
        ratio: its aspect ratio.
        padding: maximum shift of the padded crop, in pixels. Default 4, the usual choice for CIFAR's 32 pixels.
        padding_mode: what the padded crop has beyond the image's edges: `"reflect"` (default), its pixels, mirrored; or
            `"constant"`, the mean colour (`mean`, rounded to levels): torchvision's `RandomCrop` with that `fill`.
        views: number of images to make of each training sample, from one decoding. Each view's draws are a function of
            (seed, epoch, sample, view). Above 1, images are `(B, V, C, H, W)`. Or a list of dicts, such as `[{"count":
            2, "scale": (0.4, 1)}, {"count": 4, "image_size": 96, "scale": (0.05, 0.4)}]` (multi-crop; Caron et al.
            2020, arXiv:2006.09882): images are a tuple of such tensors, one per dict. `image_size`, `crop`, `scale`,
            `ratio`, `padding`, `padding_mode`, `flip`, `color_jitter`, `policy` and `cutout` may differ among them. A
            JPEG is decoded at a smaller size only if this suffices for all views. Default 1: images are `(B, C, H, W)`.
        eval_crop: in evaluation, `"center"` (a central crop, resized; default), `"whole"` (the full image, resized to
            the shape of the output, whatever its own; timm's "squash") or `"fit"` (a letterbox: the full image, scaled
            to fit, in its own shape, and centred on the mean colour; timm's "border").
        eval_ratio: with `eval_crop="center"`, the size of the central crop relative to the largest one of the shape of
            the output, rounded down to whole pixels, as FFCV's; for square images, its side relative to the image's
            shorter side. Default 224/256, customary for
            ImageNet.
        interpolation: `"bilinear"` (default) or `"bicubic"`, antialiased, or `"nearest"`, with exactly the pixels of
            Pillow (from version 13 on, Pillow shrinks tall images first vertically, which changes some by a level or
            two); or `"area"`, OpenCV's, with exactly FFCV's pixels. Only `"bilinear"` in training is faster and less
            exact: within two levels of Pillow, four if a raw image shrinks more than eightfold, and a few more of JPEGs
            decoded at a smaller size, as in no other case. Of images of other channels, or of 16 bits, each channel is
            resized by itself; `"area"`, `color_jitter`, `policy` and `operations` are not available for them.
        flip: True mirrors each training image or not, at random in each epoch. `"alternating"`: at random in epoch 0,
            inverted in every odd epoch, so that two epochs show each image both ways (airbench's, arXiv:2404.00498,
            section 3.6; better with few epochs). False: never.
        color_jitter: maximum deviation of a training image's brightness, contrast and saturation factors from 1, each
            drawn at random, as in torchvision's `ColorJitter`. Default (0, 0, 0): off.
        policy: an augmentation policy for training images, after the colour operations and before further operations:
            `{"name": "rand_augment", "num_ops": 2, "magnitude": 9, "num_magnitude_bins": 31}`,
            `{"name": "trivial_augment", "num_magnitude_bins": 31}` or
            `{"name": "aug_mix", "severity": 3, "width": 3, "depth": -1, "alpha": 1.0}`; options may be omitted. As
            torchvision's `RandAugment`, `TrivialAugmentWide` and `AugMix`. Default None: no policy.
        cutout: side, in pixels, of a randomly placed square of a training image that is filled with `mean`
            (DeVries and Taylor 2017, arXiv:1708.04552). Default 0: off.
        mean, std: of each channel, for pixels scaled to 0–1 (by 255, or 65535 for 16 bits). Default: ImageNet's, for
            three channels.
        dtype: `torch.float32` or `torch.bfloat16`, normalised; or `torch.uint8`, as stored (8 bits only).
        fields: names of further fields of the file, yielded after the labels: a tensor for numbers and arrays, a list
            for bytes and JSON. Targets that move with the image, as `convert` stored them, are cropped, resized and
            mirrored like its pixels, and equal torchvision's `tv_tensors` after the same draws: masks `(B, H, W)` uint8
            (int32 if there are class indices above 255), resized to the nearest pixel, 255 where there is no image;
            lists of boxes `(n, 4)` (left, top, right, bottom) and of keypoints `(n, 2)` (x, y), float32, in pixels of
            the output. Boxes are cut at the crop's edges, and those outside of it stay, without an area. For a file
            without a manifest, a dict of names and kinds, `{"mask": "mask", "boxes": "boxes", "points": "keypoints"}`;
            with None, a field is as stored.
        on_error: what to do with a training sample that cannot be decoded, or does not match its checksum: `"raise"`
            (default), or `"skip"`: another one of `indices` takes its place, drawn as a function of (seed, epoch,
            sample), so that batches are the same for any number of workers and ranks; `replaced` lists those of this
            rank. Evaluation always raises: its figures would be of other data. So does a file that has become shorter.
        verify: compare each sample with its CRC-32 in the manifest before it is used. Default False, because it takes
            time; `drivetrain verify` checks the full file once.
        rank, world_size: this process's shard of each batch (a contiguous slice). Default None: those of
            torch.distributed's process group, if there is one.

    Raises:
        BetonError: for an unusable file, or (while iterating) a sample that cannot be decoded, or has changed since the
            conversion (`verify`).
        DataError: for an invalid argument, or settings that need more memory than available.
        MissingExtra: for `operations`, if FFCV is not installed.

    Example::

        >>> loader = FFCVLoader("train.beton", batch_size=8, image_size=32, workers=2)
        >>> for images, labels in loader:
        ...     pass
        >>> images.shape, labels.shape
        (torch.Size([8, 3, 32, 32]), torch.Size([8]))
        >>> loader.close()
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        image_size: ImageSize,
        train: bool = True,
        seed: int = 0,
        workers: int | None = None,
        order: str | None = None,
        indices: Any = None,
        device: torch.device | str = "cpu",
        batches_ahead: int = 3,
        operations: Sequence[Any] = (),
        cache: str | Path | None = None,
        cache_limit: float | None = None,
        patience: float = PATIENCE,
        **settings: Any,
    ) -> None:
        order = order or ("random" if train else "sequential")
        settings |= {"batch_size": batch_size, "image_size": image_size, "train": train, "seed": seed}
        self.workers, self._device = check_workers(workers), check_device(device)
        self._ahead, self._operations = check_ahead(batches_ahead), tuple(operations)
        self.beton: BetonFiles = open_files(source, Remote(cache, cache_limit, patience))
        super().__init__(make_settings(order=order, **settings), indices, len(self.beton), self.beton)
        self._pool: ThreadPoolExecutor | None = None
        self._stops: WeakSet[Stop] = WeakSet()  # of all epochs whose batches may be loading
        self._feed = feed_of(self.device, self.settings, self.beton.depth)
        self._decoder = self._try_decoder()
        # For the batches in preparation, the one in use, and two spare ones.
        each = len(self.settings.groups) + len(self._decoder.targets.kinds)
        self._buffers = Buffers(keep=(self._ahead + 3) * each)

    def _try_decoder(self) -> Decoder:
        """Return a decoder; raise `DataError` if the system has too little memory for its tables."""
        try:
            return self._make_decoder()
        except Exception as error:
            if not is_exhaustion(error):
                raise
            raise exhaustion(error, self._wanted()) from error

    def _make_decoder(self) -> Decoder:
        decoder = Decoder(self.beton, self.settings, self._operations)
        self._sample_bytes = 3 * self.settings.sample_pixels + int(self.beton.sizes.mean())
        share = (
            -(-min(self.settings.batch_size, len(self.indices)) // self.settings.world_size)
            + self._last.joined
        )
        groups = [prod(shape) * self._image_dtype.itemsize for shape in decoder.shapes(share)]
        groups.append(share * decoder.targets.sample_bytes)
        if self._feed is not None:
            groups = [
                1 << (size - 1).bit_length() for size in groups if size
            ]  # torch rounds pinned memory up
        self.memory = decoder.require_memory(self._ahead + 3, sum(groups), self.workers)
        return decoder

    def _resize(self) -> None:
        self._decoder = self._try_decoder()

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        ahead: deque[_Pending] = deque()
        batches = self._loaded(epoch, start, ahead)
        if self._feed is None:
            return batches
        return self._feed.deliver(batches, lambda: bool(ahead) and ahead[0].done())

    def _loaded(self, epoch: int, start: int, ahead: deque[_Pending]) -> Generator[Batch, None, None]:
        """Yield the batches on the host; `ahead` has those in preparation."""
        shares = self._shares(epoch)[start:]
        stop = Stop()
        self._stops.add(stop)
        try:
            for number in range(len(shares)):
                while len(ahead) <= self._ahead and number + len(ahead) < len(shares):
                    ahead.append(self._submit(shares[number + len(ahead)], epoch, stop))
                yield self._batch(ahead.popleft().result())
        finally:
            stop.set()
            with interrupts_held():
                for pending in ahead:
                    pending.cancel()

    def _submit(self, indices: NDArray[np.int64], epoch: int, stop: Stop) -> _Pending:
        """Start loading a batch, in chunks."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="drivetrain-load")
            self._process = os.getpid()
        elif self._process != os.getpid():
            raise DataError(
                "This process was forked from the one whose threads load, and has none of them. Start processes with "
                "spawn, or create the loader in them."
            )
        self.beton.prefetch(indices % len(self.beton))
        decoder = self._decoder
        images = [self._empty(shape, self._image_dtype) for shape in decoder.shapes(len(indices))]
        targets = decoder.targets.empty(len(indices), self._empty)
        request = decoder.request(indices, epoch, images, self.indices, targets, stop)
        step = self._chunk(len(indices))
        with interrupts_held():
            parts = [
                self._pool.submit(decoder.load, request, slice(at, at + step))
                for at in range(0, len(indices), step)
            ]
        return _Pending(parts, request)

    def _chunk(self, n: int) -> int:
        """Return the number of samples in a chunk of a batch of n.

        Chunks are so small that no worker idles at the batch's end. Chunks below `_CHUNK` cost more to start than they
        gain; they are used only if the batches in preparation would otherwise not have one for each worker, and never
        below `_FEWEST` samples.
        """
        share = -(-n // (2 * self.workers))
        each = -(-n * (self._ahead + 1) // self.workers)
        least = min(_CHUNK // self._sample_bytes, max(each, _FEWEST))
        return max(min(share, self._decoder.part), least, 1)

    @property
    def _image_dtype(self) -> torch.dtype:
        """That of the images on the host; a GPU normalises bytes."""
        return self.settings.dtype if self._feed is None or self.beton.depth == 16 else torch.uint8

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a part of a batch."""
        return self._buffers.empty(shape, dtype) if self._feed is None else self._feed.pinned(shape, dtype)

    def _batch(self, request: BatchRequest) -> Batch:
        self.replaced += request.replaced
        values = (
            request.targets[name] if name in request.targets else self._values(request.indices, (name,))[0]
            for name in (self.beton.label_name, *self.settings.fields)
        )
        return _images(request, self.settings), *values

    def _release(self) -> None:
        for stop in list(self._stops):
            stop.set()
        if self._pool is not None:
            end(self._pool)
            self._pool = None
        self.beton.close()
        self._decoder.close()
        self._buffers.clear()


def _images(request: BatchRequest, settings: Settings) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return a batch's images, as the loader yields them."""
    if not settings.has_views:
        return request.draws[0].images[:, 0].permute(0, 3, 1, 2)
    groups = tuple(draw.images.permute(0, 1, 4, 2, 3) for draw in request.draws)
    return groups[0] if isinstance(settings.views, int) else groups


class _Pending:
    """A batch in preparation: its chunks, and the memory they fill."""

    def __init__(self, parts: list[Future[None]], request: BatchRequest) -> None:
        self._parts, self._request = parts, request

    def result(self) -> BatchRequest:
        """Wait for all chunks; raise the exception of any of them."""
        results(self._parts)
        return self._request

    def done(self) -> bool:
        """Whether `result` would not wait."""
        with interrupts_held():
            return all(part.done() for part in self._parts)

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()
