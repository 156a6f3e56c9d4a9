"""`FFCVLoader`: batches from `.beton` files, decoded in Drivetrain's own threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any, Unpack
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.errors import DataError
from ..common.options.signatures import documented
from ..common.signals import interrupts_held
from ..common.storage.cache import Remote
from ..common.storage.holes import STREAM_BLOCK
from ..common.threads import end, results
from .arguments import check_device
from .beton.data_set import BetonFiles, open_files
from .decode.decoder import BatchRequest, Decoder
from .device import Buffers, feed_of
from .epochs import Batch, EpochLoader
from .native.stop import Stop
from .options import LoaderKeywords, LoaderOptions, check_workers
from .order.batches import WINDOW
from .sources import Source

_FEWEST = 64
_CHUNK = 1 << 20  # bytes that a chunk reads and writes, at least: starting it takes ten small images' time
# A batch in preparation: its chunks, and the memory they fill.
_Pending = tuple[list[Future[None]], BatchRequest]


@documented(LoaderOptions)
class FFCVLoader(EpochLoader):
    """Load a `.beton` file, or several; samples and pixels do not depend on the number of workers and ranks.

    Yields `(images, labels)`: images `(B, C, H, W)` (several per sample: `views`) with channels-last strides; C is 3,
    or 1 or 4 for files converted with `image_mode`; normalized float32 or bfloat16, or uint8; labels `(B,)` int64
    (class indices) or float32 (targets), or `(B, K)` float32 (vectors). Each batch has its own memory.

    Of a JPEG only the crop is decoded; damage outside of it is noticed by `verify=True`, or `drivetrain verify`.

    Order and augmentation depend only on (seed, epoch, sample index). Each `for` loop over the loader is one epoch; the
    next loop is the next epoch, unless `set_epoch` selects another.

    Args:
        source: the file, or its address, such as `s3://bucket/train.beton`; it is validated before anything is decoded.
            A pattern such as `train-{000..127}.beton` names several files that are one data set, whose samples are
            numbered in this order. A dict of sources and weights, `{"photos.beton": 3, "scans.beton": 1}`, is a
            mix: an epoch has as many samples as all of them together, and of each data set its share by weight; see
            `order.epoch.mixed`. Files of a data set, and of a mix, have the same fields and classes.
        indices: the samples to use, as indices or as a boolean mask. Default None: all.
        device: where the batches go. Bytes are copied to a GPU from pinned memory and normalized there on a separate
            stream, one batch ahead; only the stream that is current when a batch is yielded waits for it.
        operations: further FFCV operations (`ffcv.transforms`), applied to the uint8 images of each sample after the
            color operations and before CutOut; their random numbers are seeded for each sample.

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
        indices: Any = None,
        device: torch.device | str = "cpu",
        operations: Sequence[Any] = (),
        **options: Unpack[LoaderKeywords],
    ) -> None:
        own = LoaderOptions.here(options)
        self.workers, self._device = check_workers(own.workers), check_device(device)
        self._operations = tuple(operations)
        remote = Remote(own.cache, own.cache_limit, own.patience, own.stream)
        self.beton: BetonFiles = open_files(source, remote)
        super().__init__(own, indices, len(self.beton), self.beton, options.get("rank") is not None)
        self._pool: ThreadPoolExecutor | None = None
        self._stops: WeakSet[Stop] = WeakSet()  # of all epochs whose batches may be loading
        self._feed = feed_of(self.device, self.settings, self.beton.depth)
        self._group = 1  # batches of a stream that are announced together
        self._ahead = deque[_Pending]()  # the batches in preparation of the newest loop
        self._prepare()
        # For the batches in preparation, the one in use, and two spare ones.
        each = len(self.settings.groups) + len(self._decoder.targets.kinds)
        self._buffers = Buffers(keep=(self.settings.batches_ahead + 3) * each)

    def _prepare(self) -> None:
        with self._exhaustion_explained():
            decoder = Decoder(self.beton, self.settings, self._operations)
            self._sample_bytes = 3 * self.settings.sample_pixels + int(self.beton.known.sizes.mean())
            batch = min(self.settings.batch_size, len(self._indices))
            share = -(-batch // self.settings.world_size) + self._last.joined
            groups = [prod(shape) * self._image_dtype.itemsize for shape in decoder.shapes(share)]
            groups.append(share * decoder.targets.sample_bytes)
            if self._feed is not None:  # torch rounds pinned memory up
                groups = [1 << (size - 1).bit_length() for size in groups if size]
            self._require_room(share)
            self.memory = decoder.require_memory(self.settings.batches_ahead + 3, sum(groups), self.workers)
            self._decoder = decoder

    def _require_room(self, share: int) -> None:
        """Raise DataError if a stream may not keep the batches in preparation."""
        if self.beton.room is None:
            return
        each = int(self.beton.known.sizes.mean()) + STREAM_BLOCK  # a sample ends within a block
        needed = (self.settings.batches_ahead + 2) * share * each
        # Announced together, neighbours are fetched together. In runs, few samples share no block with others.
        own = each - STREAM_BLOCK if self.settings.order == "quasi_random" else each
        self._group = max(1, min(WINDOW, int(self.beton.room) // (3 * share * own)))
        if needed > self.beton.room:
            raise DataError(
                f"stream=True: this process may keep {self.beton.room / 1e9:,.3f} GB of {self.beton.name}, and the "
                f"batches in preparation take about {needed / 1e9:,.3f} GB. Pass a larger cache_limit=, or fewer "
                "batches_ahead=."
            )

    def _is_ready(self) -> bool:
        with interrupts_held():
            return bool(self._ahead) and all(part.done() for part in self._ahead[0][0])

    def _loaded(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        ahead = self._ahead = deque()
        shares = self.shares(epoch)[start:]
        announce = self._announcer(shares, epoch, start)
        stop = Stop()
        self._stops.add(stop)
        try:
            for number in range(len(shares)):
                while len(ahead) <= self.settings.batches_ahead and number + len(ahead) < len(shares):
                    place = number + len(ahead)
                    announce(place)
                    ahead.append(self._submit(shares[place], epoch, stop))
                yield self._batch(_finished(*ahead.popleft()))
        finally:
            stop.set()
            with interrupts_held():
                for parts, _ in ahead:
                    for part in parts:
                        part.cancel()
            ahead.clear()  # their memory, too

    def _submit(self, indices: NDArray[np.int64], epoch: int, stop: Stop) -> _Pending:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="drivetrain-load")
            self._process = os.getpid()
        elif self._process != os.getpid():
            raise DataError(
                "This process was forked from the one whose threads load, and has none of them. Start processes with "
                "spawn, or create the loader in them."
            )
        decoder = self._decoder
        images = [self._empty(shape, self._image_dtype) for shape in decoder.shapes(len(indices))]
        targets = decoder.targets.empty(len(indices), self._empty)
        request = decoder.request(indices, epoch, images, self._indices, targets, stop)
        step = self._chunk(len(indices))
        with interrupts_held():
            parts = [
                self._pool.submit(decoder.load, request, slice(at, at + step)) for at in range(0, len(indices), step)
            ]
        return parts, request

    def _announcer(self, shares: Sequence[NDArray[np.int64]], epoch: int, start: int) -> Callable[[int], None]:
        """Return what begins to read each batch of an epoch, by its place among the shares from number `start` on. Of a
        stream, the batches that follow are read in groups, whose neighbours in the file are fetched together."""
        samples = len(self.beton)
        if self.beton.room is None:
            return lambda place: self.beton.prefetch(shares[place] % samples)
        coming, first = Coming(self.shares(epoch + 1), samples), epoch * len(self) + start
        begin, announced = (epoch + 1) * len(self), 0

        def announce(place: int) -> None:
            nonlocal announced
            while announced <= min(place + self._group, len(shares) - 1):
                # The first batch by itself, because it is waited for.
                end = min(announced + (self._group if announced else 1), len(shares))
                some = [shares[number] % samples for number in range(announced, end)]
                indices = np.concatenate(some)
                times = np.repeat(np.arange(first + announced, first + end), [len(each) for each in some])
                self.beton.prefetch(indices, times.astype(np.float32), begin + coming.batches(indices))
                announced = end

        return announce

    def _chunk(self, n: int) -> int:
        """Return the number of samples in a chunk of a batch of n: so few that no worker idles at the batch's end, but
        none below `_CHUNK` unless needed for one per worker, and none below `_FEWEST` samples."""
        share = -(-n // (2 * self.workers))
        each = -(-n * (self.settings.batches_ahead + 1) // self.workers)
        least = min(_CHUNK // self._sample_bytes, max(each, _FEWEST))
        return max(min(share, self._decoder.part), least, 1)

    @property
    def _image_dtype(self) -> torch.dtype:
        """That of the images on the host; a GPU normalizes bytes."""
        return self.settings.dtype if self._feed is None or self.beton.depth == 16 else torch.uint8

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers.empty(shape, dtype) if self._feed is None else self._feed.pinned(shape, dtype)

    def _batch(self, request: BatchRequest) -> Batch:
        self.replaced += request.replaced
        values = (
            request.targets[name] if name in request.targets else self._value(request.indices, name)
            for name in (self.beton.label_name, *self.settings.fields)
        )
        if not self.settings.has_views:
            return request.draws[0].images[:, 0].permute(0, 3, 1, 2), *values
        groups = tuple(draw.images.permute(0, 1, 4, 2, 3) for draw in request.draws)
        return groups[0] if isinstance(self.settings.views, int) else groups, *values

    def _release(self) -> None:
        for stop in list(self._stops):
            stop.set()
        if self._pool is not None:
            end(self._pool, self.beton.close)  # which ends what they wait for of a server
            self._pool = None
        self._ahead.clear()  # also while somebody holds the iterator of a loop that was left
        self.beton.close()
        self._decoder.close()
        self._buffers.clear()


class Coming:
    """In which batch of an epoch a rank uses each sample."""

    def __init__(self, shares: Sequence[NDArray[np.int64]], samples: int) -> None:
        every = [share % samples for share in shares]
        numbers = np.repeat(np.arange(len(every), dtype=np.float32), [len(one) for one in every])
        used = np.concatenate(every) if every else np.empty(0, np.int64)
        self._used, first = np.unique(used, return_index=True)
        self._numbers = numbers[first]

    def batches(self, indices: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the number of the batch of each index `(n,)`; infinity for those that it does not use."""
        if not len(self._used):
            return np.full(len(indices), np.inf, np.float32)
        places = np.minimum(np.searchsorted(self._used, indices), len(self._used) - 1)
        return np.where(self._used[places] == indices, self._numbers[places], np.float32(np.inf))


def _finished(parts: Sequence[Future[None]], request: BatchRequest) -> BatchRequest:
    """Return the request when all its chunks are loaded; raise the exception of any of them."""
    results(parts)
    return request
