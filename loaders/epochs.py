"""What all loaders share: epochs, the position in one, and the interface that makes them interchangeable."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.checks import check_whole, plain
from ..common.errors import DataError, suggest
from ..common.exhaustion import exhaustion, is_exhaustion
from .arguments import check_images, check_indices
from .beton.data_set import BetonFiles
from .beton.reader import count_classes
from .image_size import ImageSize, size_text
from .options import LoaderOptions, odd_size, too_small
from .order import (
    LastBatch,
    check_batch_size,
    epoch_batches,
    last_batch,
    mixed,
    rank_slice,
    require_pages,
    shares,
)

Batch = tuple[Any, ...]
"""Images `(B, 3, H, W)`, with `views` `(B, V, 3, H, W)` or a tuple of them; labels `(B,)`, `(B, K)` or, of masks,
`(B, H, W)`; then the further fields requested by name."""


class EpochLoader(ABC):
    """A loader that counts its epochs. Each `for` loop over it is one epoch; the next loop is the next epoch.

    The sample order depends only on (seed, epoch), so a subclass that loads the same file yields the same samples in
    the same batches.
    """

    settings: LoaderOptions
    _device: torch.device
    workers: int
    beton: BetonFiles | None
    """The files; None if the source is not a `.beton`."""

    def __init__(self, settings: LoaderOptions, indices: Any, samples: int, beton: BetonFiles | None) -> None:
        self.settings, self.samples, self.beton = settings, samples, beton
        _check_contents(settings, beton)
        self._pages = None if beton is None or settings.order != "quasi_random" else beton.pages
        self._weighted = () if beton is None else beton.parts
        self._weights = [weight for weight, _, _ in self._weighted]
        if self._weighted and settings.order == "sequential":
            raise DataError(
                f"The mix {beton.name if beton else ''} has weights, which order='sequential' does not keep. To "
                "evaluate, load each data set by itself, or all without weights: '{a,b}.beton'."
            )
        self.replaced: list[int] = []
        """Samples of this rank for which others were loaded (`on_error="skip"`), since the list was last emptied."""
        self.set_indices(indices)
        if settings.order == "quasi_random":
            require_pages(self._pages)
        self._next_epoch, self._resume_at = 0, 0
        self._epoch, self._position = 0, 0
        self._running = 0  # number of the active iteration; a new one, or close(), ends older ones

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, beginning with number `start`."""

    @abstractmethod
    def _release(self) -> None:
        """Release threads and processes, and wait until they have ended."""

    def close(self) -> None:
        """Release threads and processes. Iterating again starts new ones."""
        self._running += 1
        self._release()

    @property
    def device(self) -> torch.device:
        """The device of the batches. Set in the constructor, because memory and pinning depend on it."""
        return self._device

    @property
    def classes(self) -> list[str]:
        """Names of the classes in label order; empty if the data set has none."""
        return [] if self.beton is None else self.beton.classes

    @property
    def labels(self) -> NDArray[Any]:
        """The labels of all samples of the data set, `(N,)` or `(N, K)`.

        Raises:
            DataError: if the data set does not list them.
        """
        if self.beton is None:
            raise DataError(f"{type(self).__name__} has no list of its labels.")
        return self.beton.labels

    @property
    def num_classes(self) -> int:
        """Number of classes; see `count_classes`. Of masks without class names 0: it is not known."""
        return len(self.classes) if self.has_masks else count_classes(self.classes, self.labels)

    @property
    def has_masks(self) -> bool:
        """Whether the labels are masks, `(B, H, W)` in a batch."""
        return self.beton is not None and self.beton.label_name in self.beton.targets

    @property
    def channels(self) -> int:
        """The number of the images' channels."""
        return len(self.settings.mean)

    @property
    def depth(self) -> int:
        """The bits of each value of the images, 8 or 16, as stored."""
        return 8 if self.beton is None else self.beton.depth

    def _values(self, indices: NDArray[np.int64], names: Iterable[str]) -> list[Any]:
        """Return these fields of the samples `indices` `(n,)`: tensors, or lists of bytes or of JSON values."""
        assert self.beton is not None
        return [_collated(self.beton, name, indices) for name in names]

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        full, rest = divmod(len(self.indices), self.settings.batch_size)
        return full + (rest > 0 and not self._last.dropped and not self._last.joined)

    @property
    def _last(self) -> LastBatch:
        own = self.settings
        return last_batch(
            len(self.indices), own.batch_size,
            drop_last=own.drop_last, pad_last=own.pad_last, train=own.train, world_size=own.world_size,
        )  # fmt: skip

    @property
    def dropped(self) -> int:
        """Number of samples that each epoch leaves out (`drop_last`), over all ranks."""
        return self._last.dropped

    @property
    def padded(self) -> int:
        """Number of samples that each epoch repeats (`pad_last`, or equal shards in training), over all ranks."""
        return self._last.padded

    def __iter__(self) -> Iterator[Batch]:
        if self.beton is not None:
            self.beton.require_sizes()
        self._epoch, start = self._next_epoch, self._resume_at
        self._next_epoch, self._resume_at = self._epoch + 1, 0
        self._position = start
        self._running += 1
        return self._counted(self._epoch, start, self._running)

    def _counted(self, epoch: int, start: int, iteration: int) -> Iterator[Batch]:
        batches = self._batches(epoch, start)
        while (batch := self._next(batches)) is not None:
            self._position += 1
            yield batch
            if self._running != iteration:
                raise DataError(
                    f"The loader was closed or iterated again during this loop over epoch {epoch}. Use one loop at a "
                    "time, or two loaders."
                )

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        """Return the next batch; None after the last one. If the system refuses memory, threads or processes, the
        loader releases its own."""
        try:
            return next(batches, None)
        except Exception as error:
            if not is_exhaustion(error):
                raise
            self.close()
            raise exhaustion(error, self._wanted()) from error

    def _wanted(self) -> str:
        own = self.settings
        share = -(-own.batch_size // own.world_size)
        batch = share * own.sample_pixels * self.channels * own.dtype.itemsize
        return (
            f"workers={self.workers}, and with batches_ahead={own.batches_ahead} {own.batches_ahead + 1} batches of "
            f"{batch:,} bytes, {share} images of {size_text(own.image_size)} pixels each"
        )

    def _shares(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return this rank's samples for each batch of an epoch; for repeated ones, see `mixed`."""
        own, indices = self.settings, self.indices
        if self._parts:
            indices = mixed(self._parts, self._weights, seed=own.seed, epoch=epoch, samples=self.samples)
        batches = epoch_batches(
            indices, order=own.order, seed=own.seed, epoch=epoch,
            batch_size=own.batch_size, drop_last=own.drop_last, pad_last=own.pad_last, train=own.train,
            world_size=own.world_size, pages=self._pages,
        )  # fmt: skip
        return [rank_slice(batch, own.rank, own.world_size) for batch in batches]

    def set_indices(self, indices: Any) -> None:
        """Set the samples of the following epochs; None selects the full data set.

        Raises:
            DataError: if an index is out of range, or there are too few for a batch.
        """
        chosen = check_indices(indices, self.samples)
        check_batch_size(
            self.settings.batch_size,
            len(chosen),
            full=(self.settings.train or self.settings.drop_last) and not self.settings.pad_last,
            world_size=self.settings.world_size,
        )
        parts = [chosen[(chosen >= first) & (chosen < end)] for _, first, end in self._weighted]
        drawn = shares(len(chosen), self._weights) if parts else []
        for part, count, (weight, first, end) in zip(parts, drawn, self._weighted, strict=True):
            if len(part) == 0:
                raise DataError(
                    f"indices= has no sample of the data set with the samples {first} to {end - 1}, which has a "
                    "weight in the mix. Leave that data set out."
                )
            if count == 0:
                raise DataError(
                    f"The weight {weight:g} leaves no sample of {len(chosen)} for the data set with the samples "
                    f"{first} to {end - 1}. Leave it out, or raise its weight."
                )
        self.indices: NDArray[np.int64] = chosen
        self._parts = parts

    def set_image_size(self, image_size: ImageSize) -> None:
        """Set the size of the images for the following epochs (progressive resizing).

        Raises:
            DataError: for an invalid size; a loop already running over the loader raises it at its next batch.
        """
        changed = dataclasses.replace(self.settings, image_size=image_size)
        _check_contents(changed, self.beton)
        self.close()
        before, self.settings = self.settings, changed
        try:
            self._resize()
        except DataError:
            self.settings = before
            raise

    def _resize(self) -> None:  # noqa: B027  nothing, for most
        """Prepare for images of another size, that of `settings`; raise DataError if they do not fit into memory."""

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`, beginning with its first batch."""
        epoch = plain(epoch)
        check_whole("epoch", epoch, DataError, 0, 2**63 - 1)
        self._next_epoch, self._resume_at = epoch, 0
        self._epoch, self._position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position: the epoch, and how many of its global batches have been yielded."""
        mix = {"weights": self._weights} if self._weighted else {}
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.settings.seed,
            "batch_size": self.settings.batch_size,
            "samples": len(self.indices),
            "order": self.settings.order,
            "batches": len(self),
            **mix,
        }

    def load_state_dict(self, state: dict[str, Any], *, within: bool = False) -> None:
        """Continue right after the last batch of `state` (from `state_dict`), also with another number of ranks.

        After the last batch of an epoch, the next loop is the next epoch; with `within`, it is the rest of this epoch,
        without a batch. Raises DataError if the state has another seed, batch size, order or data set, or if the rest
        of its epoch cannot be shared among these ranks.
        """
        own = {"weights": [], **self.state_dict()}
        state = {"batches": len(self), "weights": [], **state}  # states of older versions lack them
        for key, value in own.items():
            given = state.get(key)
            if type(given) is not type(value) or (isinstance(given, int) and given < 0):
                raise DataError(f"The loader's state has {key}={given!r}. Pass the result of state_dict().")
        for key in ("seed", "batch_size", "samples", "order", "weights"):
            if state[key] != own[key]:
                raise DataError(
                    f"The loader's state has {key}={state[key]}, but this loader has {own[key]}. Create the loader "
                    "with the same settings, or start a new epoch with set_epoch."
                )
        finished = state["position"] >= min(state["batches"], len(self))
        if finished and state["position"] < state["batches"] and not self.settings.drop_last:
            raise DataError(
                f"The loader's state lacks its epoch's last batch, of {len(self.indices) % own['batch_size']} samples, "
                f"which cannot be shared among {self.settings.world_size} ranks. Resume on fewer ranks, or start an "
                "epoch with set_epoch."
            )
        if finished and not within:
            self.set_epoch(state["epoch"] + 1)
        else:
            self.set_epoch(state["epoch"])
            self._resume_at = self._position = len(self) if finished else state["position"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _collated(beton: BetonFiles, name: str, indices: NDArray[np.int64]) -> Any:
    values = beton.read(name, indices)
    if isinstance(values, list):
        return values
    tensor = torch.from_numpy(values)
    return tensor.float() if beton.fields[name] == "float" else tensor  # the file has no other float64


def _check_contents(settings: LoaderOptions, beton: BetonFiles | None) -> None:
    """Reject settings that require what the source does not have, or images of another size."""
    known = [] if beton is None else list(beton.fields)
    for name in settings.fields:
        if name not in known:
            where = (
                beton.name
                if beton is not None
                else "this source, which has none (convert it to a .beton file)"
            )
            raise DataError(
                f"fields={list(settings.fields)}: {name!r} is not a field of {where}.{suggest(name, known)}"
            )
    if settings.verify and (beton is None or beton.checksums is None):
        where = "the source is not a .beton file" if beton is None else f"{beton.name} has no manifest"
        raise DataError(f"verify=True needs the checksums of a manifest, but {where}. Remove verify=True.")
    if beton is not None:
        check_images(settings, beton.channels, beton.depth, beton.name)
    if settings.train and beton is not None:
        for _, own in settings.groups:
            _check_sizes(own, beton)


def _check_sizes(settings: LoaderOptions, beton: BetonFiles) -> None:
    height, width = settings.size
    if settings.crop == "random":
        small = (beton.widths < width) | (beton.heights < height)
        if small.any():
            at = int(np.argmax(small))
            sample = f"sample {at} of {beton.name}"
            raise too_small(sample, int(beton.heights[at]), int(beton.widths[at]), settings.image_size)
    if settings.shifts:
        odd = (beton.widths != width) | (beton.heights != height)
        if odd.any():
            at = int(np.argmax(odd))
            raise odd_size(
                f"sample {at} of {beton.name}", beton.widths[at], beton.heights[at], settings.image_size
            )
