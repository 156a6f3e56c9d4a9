"""`TorchLoader`: plain PyTorch (torchvision data set, DataLoader) with `FFCVLoader`'s interface: the ledger's baseline,
with the same samples in the same batches, and the same distribution of augmentations."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from types import ModuleType, TracebackType
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from ..common.errors import BetonError, DataError, DrivetrainError
from ..common.exhaustion import exhaustion, is_exhaustion
from ..common.options.signatures import documented
from ..common.signals import interrupts_held
from ..common.storage.cache import Remote
from .arguments import check_device, check_images
from .conversion.sample_source import class_names
from .datasets.torch_dataset import BetonDataset, PictureFolder, make_transform, open_dataset, set_transform
from .decode.moving import check_motion, moving_fields
from .device import DeviceFeed
from .epochs import Batch, EpochLoader
from .options import LoaderKeywords, LoaderOptions, check_workers

_END_PATIENCE = 0.2  # seconds for the workers to exit by themselves; they hold nothing that could be lost
_MANY = 64  # entries from which on a list of a data set is its data


@documented(LoaderOptions)
class TorchLoader(EpochLoader):
    """Load a folder `CLASS/image.jpg`, a `.beton` file or a data set of `(PIL image, label)` with plain PyTorch.

    Arguments and batches are `FFCVLoader`'s, but images are contiguous `(B, C, H, W)`, as PyTorch creates them.
    `workers` are processes, started with spawn, because forking after numba or torch has computed can hang; 0 loads in
    this process. Order and augmentation depend only on (seed, epoch, sample index), not on the number of workers and
    ranks. In training, torchvision crops, resizes and augments; in evaluation, pixels are `FFCVLoader`'s, bit for bit.
    Pictures are upright by their EXIF data and in RGB, as `convert` stores them.

    Raises:
        DataError, BetonError: as `FFCVLoader`.

    Example::

        >>> loader = TorchLoader("photos", batch_size=2, image_size=32, workers=0)
        >>> images, labels = next(iter(loader))
        >>> images.shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self,
        source: Any,
        *,
        indices: Any = None,
        device: torch.device | str = "cpu",
        **options: Unpack[LoaderKeywords],
    ) -> None:
        own = LoaderOptions.here(options)
        self.workers = check_workers(own.workers, least=0)
        if own.on_error == "skip":
            raise DataError("on_error='skip' is only available in FFCVLoader. Use 'raise'.")
        if own.interpolation == "area":
            raise DataError("interpolation='area' is only available in FFCVLoader. Use 'bilinear'.")
        if own.stream:
            raise DataError("stream=True is only available in FFCVLoader. Use loader='ffcv', or leave it out.")
        remote = Remote(own.cache, own.cache_limit, own.patience)
        self.dataset = open_dataset(source, make_transform(own), own.verify, remote)
        beton = self.dataset.beton if isinstance(self.dataset, BetonDataset) else None
        if isinstance(self.dataset, PictureFolder):
            check_images(own, 3, 8, str(source))
        if beton is not None:
            check_images(own, beton.channels, beton.depth, beton.name)
            self.dataset.transform = make_transform(own, beton.depth)
            targets = moving_fields(beton, own)
            check_motion(targets, own)
            if further := [name for name in own.fields if name in targets]:
                raise DataError(
                    f"fields={further}: targets that move with the image, besides the label, are only available in "
                    "FFCVLoader, and not in TorchLoader, with which a ledger compares. Leave them out, or load them as "
                    "stored: fields={name: None}."
                )
        super().__init__(own, indices, len(self.dataset), beton, options.get("rank") is not None)
        self._device = check_device(device)
        self._feed = None if self._device.type == "cpu" else DeviceFeed(self._device)
        self._keys = _Keys()
        self._generator = torch.Generator()  # used by DataLoader, so that the global one is unaffected
        self._loader: DataLoader[Any] | None = None

    @property
    def classes(self) -> list[str]:
        return class_names(self.dataset)

    @property
    def labels(self) -> NDArray[Any]:
        if self.beton is not None:
            return self.beton.labels
        if not hasattr(self.dataset, "targets"):
            raise DataError(f"{type(self.dataset).__name__} has no attribute `targets` with its labels.")
        targets, change = np.asarray(self.dataset.targets), getattr(self.dataset, "target_transform", None)
        return targets if change is None else np.asarray([change(target) for target in targets.tolist()])

    def _prepare(self) -> None:
        if self.beton is not None:  # a policy that was set may move pixels
            check_motion(moving_fields(self.beton, self.settings), self.settings)
        set_transform(self.dataset, make_transform(self.settings, self.depth))

    def _loaded(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        shares = self.shares(epoch)[start:]
        self._keys.epoch, self._keys.shares = epoch, shares[:]  # with a place of its own in the order
        if self._loader is None:
            self._loader = self._make_loader()
        try:
            batches = self._started(self._loader)
        except BaseException:
            self._release()  # workers partly in the new epoch would answer the next one wrongly
            raise
        for batch, share in zip(batches, shares, strict=False):
            if isinstance(batch, DrivetrainError):
                raise batch
            images, labels = batch
            images = tuple(images) if isinstance(images, list) else images
            labels = _as_ours(labels, vectors=self._has_vectors)
            yield images, labels, *(self._value(share % self.samples, name) for name in self.settings.fields)

    def _started(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return DataLoader's iterator over the epoch; the first one starts the workers."""
        with ExitStack() as around:
            # Workers that are already running are waited for until they finish what they began of an epoch that was
            # left early; Ctrl-C must work in the meantime.
            if self.workers and loader._iterator is None:
                self._require_importable()
                around.enter_context(_main_module_hidden(self.dataset))
                around.enter_context(_interrupts_kept_from_new_processes())
            if self._feed is not None:  # DataLoader's pinning thread uses CUDA's current device
                around.enter_context(self._feed.streams.current_device())
            around.enter_context(_on_the_host())  # DataLoader draws a number from our generator
            try:
                return iter(loader)
            except Exception as error:
                if not self.workers or is_exhaustion(error) or not (reason := _why_not_sent(self.dataset)):
                    raise
                raise DataError(
                    f"{type(self.dataset).__name__} cannot be sent to worker processes: {reason}. Use functions of a "
                    "module in place of lambdas and local functions; or workers=0, which loads in this process."
                ) from error

    def _require_importable(self) -> None:
        """Raise DataError for a data set that a notebook or an interactive session defines: workers cannot import it,
        and torch would report that the system has killed them."""
        main = sys.modules["__main__"]
        sourceless = getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None
        if sourceless and _is_of_the_script(self.dataset):
            raise DataError(
                f"{type(self.dataset).__name__} is, or uses, what a notebook or an interactive session defines, which "
                "worker processes cannot import. Move that to a module, such as data.py; or pass workers=0, which "
                "loads in this process."
            )

    def _make_loader(self) -> DataLoader[Any]:
        parallel: dict[str, Any] = {}
        if self.workers:
            parallel = {
                "num_workers": self.workers,
                "multiprocessing_context": "spawn",
                "worker_init_fn": _leave_interrupts_to_the_parent,
                "persistent_workers": True,
                "prefetch_factor": max(-(-self.settings.batches_ahead // self.workers), 1),
            }
        return DataLoader(
            _Keyed(self.dataset, self.settings, self._wanted()), batch_sampler=self._keys, collate_fn=_collated,
            generator=self._generator, pin_memory=self._feed is not None, **parallel,
        )  # fmt: skip

    def _release(self) -> None:
        loader, self._loader = self._loader, None
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:  # otherwise they would live as long as any reference to it
            _end_workers(iterator)


def _as_ours(labels: torch.Tensor, *, vectors: bool) -> torch.Tensor:
    """Return labels in the types of `FFCVLoader`'s, whatever a data set returns: numbers and vectors in float32, class
    indices in int64, masks as they are."""
    if vectors or labels.ndim == 2 or labels.is_floating_point():
        return labels.float()
    return labels.long() if labels.ndim == 1 else labels


def _end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, after a short grace period: one checks whether to exit only between
    batches, and torch would wait up to 5 s for each, one after the other."""
    if getattr(iterator, "_worker_pids_set", False):  # or torch would report a terminated worker as a failure
        _remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    timer = threading.Timer(_END_PATIENCE, _terminate, [getattr(iterator, "_workers", [])])
    timer.daemon = True
    with interrupts_held():
        timer.start()
    try:
        iterator._shutdown_workers()
    finally:
        timer.cancel()
        timer.join()


def _terminate(workers: list[Any]) -> None:
    for worker in workers:
        worker.terminate()


@contextmanager
def _interrupts_kept_from_new_processes() -> Iterator[None]:
    """Start processes in this context that ignore Ctrl-C; this one receives it after the block. A worker that is still
    importing would exit with a traceback, and torch raise a RuntimeError before the KeyboardInterrupt."""
    resource_tracker.ensure_running()  # multiprocessing's; starting it unblocks interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by new processes
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_interrupts_to_the_parent(worker: int) -> None:  # noqa: ARG001 — DataLoader passes its index
    """Ignore Ctrl-C, which the terminal sends to all processes: the parent ends the workers, and would wait 5 s for one
    that exits by itself and hangs on its full queue."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _all_but_hung_up  # an interrupted parent closes the connection to the feeder thread


def _all_but_hung_up(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Report an uncaught error as usual, unless it only means that the other side has closed the connection."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)


class _Keys:
    """(epoch, sample index) of the batches of an epoch, for DataLoader, which keeps this object from epoch to epoch."""

    epoch: int
    shares: Sequence[NDArray[np.int64]] = ()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        return ([(epoch, index) for index in share.tolist()] for share in self.shares)

    def __len__(self) -> int:
        return len(self.shares)


class _Keyed(Dataset[Any]):
    """The data set, indexed by (epoch, sample): torch's random numbers are seeded by that pair and the seed (3 µs of a
    worker's time, 2 % of a CIFAR-10 image). A sample that cannot be loaded is returned as an error."""

    def __init__(self, dataset: Any, settings: LoaderOptions, wanted: str) -> None:
        self._wanted, self._samples = wanted, len(dataset)
        self._dataset, self._seed = dataset, int(settings.seed)
        self._alternates, self._train = settings.alternates, settings.train
        self._masks = isinstance(dataset, BetonDataset) and dataset.masks is not None

    def __getitem__(self, key: tuple[int, int]) -> Any:
        if get_worker_info() is not None:
            return self._load(*key)
        # This may be the user's process: keep its global state, and make tensors where a worker does.
        with torch.random.fork_rng(devices=[]), _on_the_host():
            return self._load(*key)

    def _load(self, epoch: int, index: int) -> Any:
        flip = False
        if self._alternates:  # mirroring comes last: crops and policies are symmetric
            self._be_at(-1, index)  # of no epoch, whose first number draws the crop
            flip = (torch.rand(()).item() < 0.5) ^ bool(epoch % 2)
        self._be_at(epoch, index)
        try:
            sample = self._dataset[index % self._samples]
            return _mirrored(sample, self._masks) if flip else sample
        except BetonError as error:  # names the sample
            return error
        except Exception as error:  # the data set's own code may raise anything
            if isinstance(error, DrivetrainError) and self._train:
                return error  # of the settings: with others, the sample can be loaded
            if is_exhaustion(error):
                return exhaustion(error, self._wanted)
            failure = DataError(
                f"Sample {index % self._samples} of {type(self._dataset).__name__} could not be loaded: "
                f"{_describe_error(error)}. Exclude it with indices=, or repair it."
            )
            failure.__cause__ = error
            return failure

    def _be_at(self, epoch: int, index: int) -> None:
        mixed = self._seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB
        torch.default_generator.manual_seed(mixed % 2**64)


def _on_the_host() -> AbstractContextManager[Any]:
    """Make tensors in host memory in this context, also with another default device of torch."""
    # Not always: within torch.device(…), each of torch's functions takes longer.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _mirrored(sample: Any, masks: bool) -> Any:
    image, label, *further = sample
    return image.flip(-1), label.flip(-1) if masks else label, *further


def _collated(samples: list[Any]) -> Any:
    """Return a batch, or the error: one raised in a worker would arrive as the text of its traceback."""
    for sample in samples:
        if isinstance(sample, DrivetrainError):
            return sample
    try:
        with _on_the_host():
            batch = default_collate(samples)
    except Exception as error:  # of several types, depending on the data set
        if is_exhaustion(error):
            return exhaustion(error, f"memory for a batch of {len(samples)} samples")
        return DataError(
            f"The samples cannot be collated into a batch: {_describe_error(error)}. Each must be an image and a "
            "label, a number or an array, all of the same shape."
        )
    if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], torch.Tensor):
        return batch
    first, what = samples[0], type(samples[0]).__name__
    if isinstance(first, list | tuple):
        what = f"({', '.join(type(each).__name__ for each in first)})"
    return DataError(f"A sample of the data set is {what}. Each must be an image and a label, a number or an array.")


def _why_not_sent(dataset: Any) -> str:
    """Return why a data set cannot be pickled for another process; "" if it can. To find out takes as long as to send
    it, so that it is done only after a failure."""
    try:
        ForkingPickler.dumps(dataset)
    except Exception as error:  # of several types, and those of the data set's own code
        return _describe_error(error)
    return ""


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def _is_of_the_script(dataset: Any) -> bool:
    """Whether workers need the user's script: for the class of the data set, or for what it has, such as a function
    of the script as `loader` or `target_transform`, also within a partial or torchvision's `Compose`."""
    level: list[Any] = [dataset]
    for _ in range(5):  # of a Subset, the data set, its Compose, the list of this, and a function in it
        if any(_module_of(part) == "__main__" for part in level):
            return True
        level = [inner for part in level for inner in _inside(part)]
    return False


def _module_of(part: Any) -> Any:
    with suppress(Exception):  # a proxy may raise anything
        return getattr(part, "__module__", None)
    return None


def _inside(part: Any) -> Iterable[Any]:
    """Return what an object of a data set has, and takes to a worker."""
    if isinstance(part, type | ModuleType):
        return ()
    if isinstance(part, partial):
        return part.func, *part.args, *part.keywords.values()
    if isinstance(part, list | tuple | dict):
        entries: Iterable[Any] = part.values() if isinstance(part, dict) else part
        return entries if len(part) < _MANY else ()
    if any("__getstate__" in vars(kind) for kind in type(part).__mro__[:-1]):  # it leaves something here
        return ()
    values: Iterable[Any] = getattr(part, "__dict__", {}).values()
    return values


@contextmanager
def _main_module_hidden(dataset: Any) -> Iterator[None]:
    """Keep spawned workers from running the user's script again: multiprocessing re-imports `__main__` by its
    `__file__`, so one without a main guard would start over in every worker."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if _is_of_the_script(dataset) or path is None or getattr(main, "__spec__", None):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path
