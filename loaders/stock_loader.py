"""`StockFFCVLoader`: FFCV's own loader with `FFCVLoader`'s interface, for its exact pixels and to compare with it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from queue import Empty
from time import monotonic
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from ..common import machine
from ..common.errors import DataError, require
from ..common.exhaustion import is_exhaustion
from ..common.options.signatures import documented
from ..common.storage.addresses import is_address
from .arguments import check_device
from .beton.data_set import BetonFiles, open_files
from .decode.ffcv_modules import ffcv_module, thread_counts_restored
from .decode.moving import moving_fields
from .device import Buffers, feed_of
from .epochs import Batch, EpochLoader
from .options import LoaderKeywords, LoaderOptions, check_workers
from .order.batches import taken
from .sources import Source, files_of

PATIENCE = 600.0  # seconds without a batch after which FFCV counts as hung
_STOPPING = 60.0  # seconds for it to finish the batch that it is working on
_PURPOSE = "use FFCV's loader"
_OURS = "use loader='ffcv' (FFCVLoader)"
_COMPILING = threading.Lock()


@documented(LoaderOptions)
class StockFFCVLoader(EpochLoader):
    """Load a `.beton` file with FFCV's own `ffcv.loader.Loader` (1.0.2).

    Images are read, cropped, resized (by area), flipped and normalized by FFCV, with its pixels. Arguments and batches
    are `FFCVLoader`'s: channels-last images and labels, in memory of their own, so you can keep them. Labels, further
    fields and the sample order are Drivetrain's, so each epoch has the same samples in the same batches as with the
    other loaders, for any number of ranks, and continues after a saved position with the next sample.

    **Augmentation is not repeatable.** FFCV draws crops and flips from generators without a seed: two training runs
    differ, also from a resumed one. Evaluation is exact: the bytes of `FFCVLoader(interpolation="area")`, which
    predictions from files have, too; floats are within 1e-6.

    FFCV does not report a JPEG that cannot be decoded: the sample gets the pixels of an earlier image. Check files from
    elsewhere with `drivetrain verify` first. The file's tables are validated before FFCV reads it, and it must not
    change while it is in use. If FFCV fails, or delivers nothing for ten minutes, the loader raises.

    Creating a loader takes some seconds, in which FFCV compiles it; changing the image size does not. Each batch is
    copied out of FFCV's memory, which it would overwrite. An epoch that is left early, `close` and errors end FFCV's
    thread. The number of threads of torch and numba, which FFCV sets for the whole process, is restored.

    What FFCV does not have is rejected: several files, mixes, addresses, more threads than numba's limit
    (`NUMBA_NUM_THREADS`), `verify`, `on_error="skip"`, `stream`, targets that move, in evaluation another `eval_crop`
    than "center" and an `image_size` of two sides, and in training another `crop` than "resized",
    `flip="alternating"`, `views`, options of color, `policy` and `cutout`. `interpolation` is "area".

    Args:
        source: one local `.beton` file.
        indices, device: see `FFCVLoader`.

    Raises:
        BetonError: for an unusable file.
        DataError: for an invalid argument, what FFCV does not have, settings that need more memory than available, and
            (while iterating) if FFCV fails.
        MissingExtra: if FFCV is not installed.
    """

    beton: BetonFiles

    def __init__(
        self,
        source: Source,
        *,
        indices: Any = None,
        device: torch.device | str = "cpu",
        **options: Unpack[LoaderKeywords],
    ) -> None:
        own = stock_options(options)
        self.workers, self._device = _check_workers(own.workers), check_device(device)
        check_stock_source(source)
        self.beton = open_files(source)
        if self.beton.remote:
            raise _at_an_address(str(self.beton.files[0].path))
        if self.beton.fields[self.beton.files[0].image_name] != "rgb_image":
            raise DataError(
                f"{self.beton.name} has its images in an ndarray field, which FFCV's own loader does not crop or "
                f"resize. To load them, {_OURS}."
            )
        if targets := moving_fields(self.beton, own):
            raise DataError(
                f"{self.beton.name} has targets that move with the image ({', '.join(targets)}: "
                f"{', '.join(set(targets.values()))}), which FFCV's own loader does not have. To move them, {_OURS}."
            )
        super().__init__(own, indices, len(self.beton), self.beton, options.get("rank") is not None)
        _require_crops(own, self.beton)
        self._feed = feed_of(self._device, own)
        self._buffers = Buffers(keep=3)  # the one in use, and two spare ones
        self._run: _Run | None = None
        self.memory = self._check_memory()
        with self._exhaustion_explained():
            self._make_loader()

    def set_policy(self, policy: Mapping[str, Any] | None) -> None:
        stock_options(
            {"batch_size": self.settings.batch_size, "image_size": self.settings.image_size, "policy": policy}
        )

    def _change(self, changed: LoaderOptions) -> None:
        _require_available(changed)
        super()._change(changed)

    def _prepare(self) -> None:
        self.memory = self._check_memory()
        # FFCV reads it at the start of each epoch, and does not compile again.
        self._decoder.output_size = self.settings.size

    @property
    def _share(self) -> int:
        return self.settings.batch_size // self.settings.world_size  # FFCV's batch size: a rank's share

    @property
    def _on_host(self) -> torch.dtype:
        """What FFCV delivers: for a GPU bytes, which are normalized there."""
        bytes_only = self._feed is not None or self.settings.dtype == torch.uint8
        return torch.uint8 if bytes_only else torch.float32

    def _make_loader(self) -> None:
        """Create FFCV's loader and compile it, by loading one sample."""
        file = self.beton.files[0].file
        with _COMPILING, thread_counts_restored(), _types_kept():
            image, self._decoder = self._operations()
            names = self.beton.fields
            self._loader: Any = ffcv_module("ffcv.loader").Loader(
                str(file.path), batch_size=self._share, num_workers=self.workers, seed=0, drop_last=False,
                batches_ahead=self.settings.batches_ahead,
                pipelines={name: image if kind == "rgb_image" else None for name, kind in names.items()},
            )  # fmt: skip
            first = self._start(taken(self._indices, np.zeros(1, np.int64)))
            try:
                first.next("while compiling")
            finally:
                first.stop()
        status = Path(file.path).stat()  # FFCV has opened the file by its name
        self.beton.require_identities([(status.st_dev, status.st_ino, status.st_size)])

    def _operations(self) -> tuple[list[Any], Any]:
        """Return FFCV's operations on images, and the first of them, which decodes."""
        own, images = self.settings, ffcv_module("ffcv.fields.rgb_image")
        transforms = ffcv_module("ffcv.transforms")
        if own.train:
            decoder = images.RandomResizedCropRGBImageDecoder(own.size, scale=own.scale, ratio=own.ratio)
        else:
            decoder = images.CenterCropRGBImageDecoder(own.size, ratio=own.eval_ratio)
        operations = [decoder]
        if own.train and own.flip:
            operations.append(transforms.RandomHorizontalFlip())
        if self._on_host == torch.float32:
            mean, std = np.array(own.mean) * 255, np.array(own.std) * 255
            operations.append(transforms.NormalizeImage(mean, std, np.float32))
        return operations, decoder

    def _check_memory(self) -> int:
        own, ahead, beton = self.settings, self.settings.batches_ahead + 2, self.beton
        pixels = own.size[0] * own.size[1] * 3
        largest = int(beton.widths.max()) * int(beton.heights.max()) * 3
        copies = 1 + (own.train and bool(own.flip)) + 4 * (self._on_host == torch.float32)
        each = self._share * (largest + copies * pixels)
        copied = 3 * self._share * pixels * (1 if self._feed else own.dtype.itemsize)
        need, free = ahead * each + copied, machine.rank_free_memory()
        if need > free:
            raise DataError(
                f"FFCV's own loader would need {need / 1e9:,.1f} GB ({ahead} batches of {each / 1e9:,.2f} GB, each "
                f"with room for {self._share} images of the largest width and height), but only {free / 1e9:,.1f} GB "
                f"are free. Use a smaller batch_size, batches_ahead=1, or {_OURS}."
            )
        return need

    def _start(self, indices: NDArray[np.int64]) -> _Run:
        with nullcontext() if self._feed is None else self._feed.streams.current_device():
            return _Run(self._loader, indices, self.beton.name)

    def _loaded(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        shares = self.shares(epoch)[start:]
        if not shares:
            return
        self._release()  # an epoch that was left, but is still referenced
        run = self._run = self._start(np.concatenate(shares))
        try:
            for number, share in enumerate(shares, start):
                yield self._batch(run, share, f"in batch {number} of epoch {epoch}")
        finally:
            run.stop()

    def _batch(self, run: _Run, share: NDArray[np.int64], where: str) -> Batch:
        shape = len(share), *self.settings.size, 3
        if self._feed is not None:
            images = self._feed.pinned(shape, torch.uint8)
        else:
            images = self._buffers.empty(shape, self.settings.dtype)
        done = 0
        while done < len(share):  # a last batch joined to the one before it comes in two
            part = torch.from_numpy(run.next(where))
            images[done : done + len(part)].copy_(part)
            done += len(part)
        values = (self._value(share, name) for name in (self.beton.label_name, *self.settings.fields))
        return images.permute(0, 3, 1, 2), *values

    def _release(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None
        self._buffers.clear()


class _Always:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: object) -> Any:
        return self._value


@contextmanager
def _types_kept() -> Iterator[None]:
    """Give FFCV a read-only type of byte arrays inside the block. It would make numba's own one read-only for the whole
    process, so that functions compiled later could not write."""
    module: Any = ffcv_module("ffcv.memory_managers.os_cache")
    numba = require("numba", "ffcv", _PURPOSE)
    mapped = numba.types.Array(numba.uint8, 1, "C", readonly=True)
    module.nb = SimpleNamespace(types=numba.types, uint64=numba.uint64, uint8=_Always(mapped))
    try:
        yield
    finally:
        module.nb = numba


class _Run:
    """FFCV's work on one epoch of the samples `indices`, in its thread."""

    def __init__(self, loader: Any, indices: NDArray[np.int64], name: str) -> None:
        self._epoch = _epoch_class()(loader, np.array(indices))
        self._name = name

    def next(self, where: str) -> NDArray[Any]:
        """Return FFCV's next images `(b, side, side, 3)`, valid until the next call; `where` is for errors."""
        try:
            given = self._epoch.output_queue.get(timeout=PATIENCE)
        except Empty:
            given = TimeoutError(f"nothing for {PATIENCE:g} seconds")
        if isinstance(given, tuple):
            _, (images,) = given
            found: NDArray[Any] = images
            return found
        if isinstance(given, Exception) and is_exhaustion(given):
            raise given
        reason = "it ended early" if given is None else f"{type(given).__name__}: {given}".rstrip(".")
        raise DataError(
            f"FFCV's own loader failed {where}, on {self._name} ({reason}). Check the file with drivetrain verify, or "
            f"{_OURS}, which names the sample."
        ) from given

    def stop(self) -> None:
        """End the thread after the batch that it is working on, and wait for it. One that hangs is given up."""
        epoch, deadline = self._epoch, monotonic() + _STOPPING
        epoch.iter_ixes = iter(())
        epoch.terminate_event.set()
        while epoch.is_alive() and monotonic() < deadline:
            with suppress(Empty):  # it may be waiting for a place in the queue
                epoch.output_queue.get(timeout=0.01)


@cache
def _epoch_class() -> Any:
    """Return FFCV's iterator over an epoch, a thread, with two changes that its users need."""
    base: Any = ffcv_module("ffcv.loader.epoch_iterator").EpochIterator

    class Epoch(base):  # type: ignore[misc]
        def __init__(self, loader: Any, order: NDArray[np.int64]) -> None:
            self._torch_threads = torch.get_num_threads()
            super().__init__(loader, order)

        def run(self) -> None:
            """Hand an error over, for which FFCV's consumer would wait without end."""
            try:
                super().run()
            except BaseException as error:
                self.output_queue.put(error)

        def run_pipeline(self, number: int, *batch: Any) -> Any:
            """Restore torch's number of threads, which FFCV has just set for all new threads of the process."""
            if number == 0:
                torch.set_num_threads(self._torch_threads)
            return super().run_pipeline(number, *batch)

    return Epoch


def stock_options(given: LoaderKeywords) -> LoaderOptions:
    """Return the checked options of FFCV's own loader; raise DataError for one that it does not have."""
    made = LoaderOptions.here({"interpolation": "area", **given})
    _require_available(made)
    return made


def _require_available(made: LoaderOptions) -> None:
    train, square = made.train, "Use one side, because FFCV evaluates on central squares"
    refused = (
        ("interpolation", made.interpolation != "area", "Leave it out, because FFCV resizes by area"),
        ("image_size", not train and isinstance(made.image_size, tuple), square),
        ("verify", made.verify, "Leave it out and run drivetrain verify before training"),
        ("on_error", made.on_error == "skip", "Leave it out and run drivetrain verify before training"),
        ("crop", train and made.crop != "resized", "Use crop='resized'"),
        ("views", made.has_views, "Leave it out"),
        ("eval_crop", not train and made.eval_crop != "center", "Use eval_crop='center'"),
        ("flip", made.alternates, "Use flip=True"),
        *((name, True, "Leave it out") for name in made.only_rgb),
        ("cutout", train and made.cutout > 0, "Leave it out"),
        ("stream", made.stream, "Leave it out"),
    )
    for name, wrong, remedy in refused:
        if wrong:
            value = getattr(made, name)
            raise DataError(f"{name}={value!r} is not available in FFCV's own loader. {remedy}, or {_OURS}.")


def check_stock_source(source: Source) -> None:
    files = files_of(source)
    if files.weights is not None or len(files.names) > 1:
        what = "a mix" if files.weights is not None else f"{len(files.names)} files"
        raise DataError(f"{files} is {what}, but FFCV's own loader reads one file. Convert to one, or {_OURS}.")
    if is_address(files.names[0]):
        raise _at_an_address(files.names[0])


def _require_crops(settings: LoaderOptions, beton: BetonFiles) -> None:
    """Raise `DataError` if a crop of an image may be empty: FFCV would end the process."""
    heights, widths = beton.heights.astype(np.float64), beton.widths.astype(np.float64)
    if settings.train:  # what FFCV falls back to when no random crop fits
        low, high = settings.ratio
        name, value = "ratio", str(settings.ratio)
        sides = np.rint(np.minimum(widths / low, heights * high))
    else:
        name, value = "eval_ratio", f"{settings.eval_ratio:g}"
        sides = np.floor(settings.eval_ratio * np.minimum(heights, widths))
    if (sides < 1).any():
        at = int(np.argmax(sides < 1))
        raise DataError(
            f"{name}={value} leaves FFCV's own loader no pixel of sample {at} of {beton.name}, which has "
            f"{beton.widths[at]} × {beton.heights[at]}. Use a ratio nearer to 1, or {_OURS}."
        )


def _at_an_address(name: str) -> DataError:
    return DataError(f"{name} is at an address, but FFCV's own loader reads local files. Download it, or {_OURS}.")


def _check_workers(workers: Any) -> int:
    workers, most = check_workers(workers), require("numba", "ffcv", _PURPOSE).config.NUMBA_NUM_THREADS
    if workers > most:
        raise DataError(
            f"workers={workers} is more than numba's {most} threads, which FFCV's own loader uses. Use at most {most}, "
            f"or set the environment variable NUMBA_NUM_THREADS, or {_OURS}."
        )
    return int(workers)
