"""What all loaders share: epochs, the position in one, and their common interface."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ..common.checks import check_whole, plain
from ..common.errors import DataError
from ..common.exhaustion import exhaustion, is_exhaustion
from ..common.table import Table
from .arguments import check_contents, require_pages
from .beton.data_set import BetonFiles
from .beton.image_modes import channels_text
from .beton.labels import LabelFacts
from .decode.moving import MovingTargets
from .device import DeviceFeed
from .image_size import ImageSize, size_text
from .options import EVAL_RATIO, LoaderOptions, check_sizes, require_no_ranks
from .order.arrays import array_order, by_weight, mixed_array
from .order.batches import (
    WINDOW,
    LastBatch,
    Order,
    Samples,
    Shares,
    as_array,
    between,
    check_batch_size,
    count_marked,
    last_batch,
    marked,
    shares,
    taken,
)
from .order.epoch import NEWEST, drawn, in_runs, mixed, shuffled, spread, unshuffled
from .sample_options import SampleOptions
from .selection import Selection, check_indices, frequencies, select, selected, used_samples

Batch = tuple[Any, ...]
"""Images `(B, 3, H, W)`, with `views` `(B, V, 3, H, W)` or a tuple of them; labels `(B,)`, `(B, K)` or, of masks,
`(B, H, W)`; then the further fields requested by name."""

_AT_ONCE = 1 << 18  # samples compared at a time


def _in_place(samples: Samples) -> Samples:
    """Return the samples in their order in the file. Those that are in it already, as most that ranks map, are not
    copied, and need no memory for each sample."""
    if isinstance(samples, np.ndarray):
        starts = range(0, len(samples), _AT_ONCE)
        parts = (samples[start : start + _AT_ONCE + 1] for start in starts)  # each with the first of the next
        if any((part[1:] < part[:-1]).any() for part in parts):
            return np.sort(samples)
    return samples


class EpochLoader(ABC):
    """A loader whose `for` loops are its epochs. The sample order depends only on (seed, epoch), so a subclass that
    loads the same file yields the same samples in the same batches."""

    _device: torch.device
    _feed: DeviceFeed | None = None
    workers: int
    beton: BetonFiles | None
    """The files; None if the source is not a `.beton`."""

    def __init__(
        self, settings: LoaderOptions, indices: Any, samples: int, beton: BetonFiles | None, ranks_given: bool = True
    ) -> None:
        self.settings, self.samples, self.beton = settings, samples, beton
        self._ranks_given = ranks_given
        self.created_with = settings
        """The settings at the beginning: `set_image_size` and `set_policy` change `settings`."""
        check_contents(settings, beton)
        self._weighted = () if beton is None else beton.parts
        self._weights = [weight for weight, _, _ in self._weighted]
        if self._weighted and settings.order == "sequential":
            raise DataError(
                f"The mix {beton.name if beton else ''} has weights, which order='sequential' does not keep. To "
                "evaluate, load each data set by itself, or all without weights: '{a,b}.beton'."
            )
        self.replaced: list[int] = []
        """Samples of this rank for which others were loaded (`on_error="skip"`), since the list was last emptied."""
        if isinstance(indices, SampleOptions):  # of a pipeline; no other sample is checked
            self.select(self.selection(indices))
        else:
            self.set_indices(indices)
        if settings.order == "quasi_random":
            require_pages(beton)
        self._next_epoch, self._resume_at = 0, 0
        self._epoch, self._position = 0, 0
        self._version = NEWEST
        self._kept_block: int | None = None  # of a resumed run in quasi-random order
        self._running = 0  # number of the active iteration; a new one, or close(), ends older ones

    @abstractmethod
    def _loaded(self, epoch: int, start: int) -> Generator[Batch, None, None]:
        """Yield this rank's batches of an epoch on the host, beginning with number `start`."""

    def _is_ready(self) -> bool:
        """Whether the next batch is available without waiting."""
        return True

    @abstractmethod
    def _release(self) -> None:
        """Release threads and processes, and wait until they have ended."""

    def close(self) -> None:
        """Release threads and processes. Iterating again starts new ones."""
        self._running += 1
        self._release()

    def _repr_html_(self) -> str:
        own, samples = self.settings, len(self._indices)
        root = getattr(getattr(self, "dataset", None), "root", "a data set")  # of torchvision's
        views = "" if own.views == 1 else f", {own.views if isinstance(own.views, int) else 'several'} views"
        ranks = f", of which rank {own.rank} of {own.world_size} loads its share" if own.world_size > 1 else ""
        memory = getattr(self, "memory", None)  # of FFCV's loaders, which know it
        rows = [
            ("data", str(root) if self.beton is None else self.beton.name),
            ("samples", f"{samples:,}" + (f" of {self.samples:,}" if samples < self.samples else "")),
            ("batches", f"{len(self):,} of {own.batch_size:,} samples{ranks}"),
            (
                "images",
                f"{size_text(own.image_size)} pixels, {channels_text(self.channels, self.depth)}{views}",
            ),
            ("classes", f"{len(self.classes):,}" if self.classes else ""),
            ("order", f"{own.order}, seed {own.seed}" + ("" if own.train else "; evaluation")),
            ("workers", str(self.workers)),
            ("memory", "" if memory is None else f"{memory / 2**20:,.0f} MiB for its batches and workers"),
            ("device", str(self.device)),
        ]
        return Table((type(self).__name__, ""), [row for row in rows if row[1]]).html()

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
    def label_facts(self) -> LabelFacts:
        """What is known of all labels.

        Raises:
            DataError: as `labels`.
        """
        return LabelFacts.of([self.labels]) if self.beton is None else self.beton.label_facts

    @property
    def num_classes(self) -> int:
        """The number of the classes' names; without, see `LabelFacts.outputs`. Of masks without names 0: it is not
        known."""
        return len(self.classes) if self.has_masks or self.classes else self.label_facts.outputs

    @property
    def has_masks(self) -> bool:
        """Whether the labels are masks, `(B, H, W)` in a batch."""
        return self.beton is not None and self.beton.label_name in self.beton.targets

    @property
    def _has_vectors(self) -> bool:
        """Whether the labels are vectors, `(B, K)` in a batch: float32, whatever type a file of FFCV's stores."""
        return self.beton is not None and self.beton.fields[self.beton.label_name] == "ndarray"

    @property
    def colors(self) -> tuple[str, ...]:
        """Colors of the classes of masks, `"#rrggbb"`, as their source had them; "" for those without one."""
        return () if self.beton is None or not self.has_masks else self.beton.colors(self.beton.label_name)

    @property
    def channels(self) -> int:
        """The number of the images' channels."""
        return len(self.settings.mean)

    @property
    def depth(self) -> int:
        """The bits of each value of the images, 8 or 16, as stored."""
        return 8 if self.beton is None else self.beton.depth

    def _value(self, indices: NDArray[np.int64], name: str) -> Any:
        """Return a field of the samples `indices` `(n,)`: a tensor, or a list of bytes or of JSON values."""
        assert self.beton is not None
        values = self.beton.read(name, indices)
        if isinstance(values, list):
            return values
        tensor = torch.from_numpy(values)
        vectors = name == self.beton.label_name and self._has_vectors
        return tensor.float() if vectors or self.beton.fields[name] == "float" else tensor

    def fields_of(self, indices: NDArray[np.int64], image_size: ImageSize) -> tuple[Any, ...]:
        """Return the further fields of the samples `indices` `(n,)`, as a batch of their full images, resized to
        `image_size`, has them."""
        assert self.beton is not None  # other sources have no fields
        own = dataclasses.replace(
            self.settings, train=False, eval_crop="whole", eval_ratio=EVAL_RATIO, image_size=image_size
        )
        moving = MovingTargets(self.beton, own).evaluated(indices)
        return tuple(moving[name] if name in moving else self._value(indices, name) for name in own.fields)

    def __len__(self) -> int:
        return self._batches(len(self._kept))

    @property
    def full_length(self) -> int:
        """Number of batches of an epoch with all of `indices`, also of those that `keep` leaves out."""
        return self._batches(len(self._indices))

    def _batches(self, samples: int) -> int:
        full, rest = divmod(samples, self.settings.batch_size)
        last = self._last_of(samples)
        return full + (rest > 0 and not last.dropped and not last.joined)

    @property
    def _last(self) -> LastBatch:
        return self._last_of(len(self._kept))

    def _last_of(self, samples: int) -> LastBatch:
        own = self.settings
        return last_batch(
            samples, own.batch_size,
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
        if self.settings.train and not self._ranks_given and self.settings.world_size == 1:
            require_no_ranks()
        if self.beton is not None:
            self.beton.require_sizes()
        self._epoch, start = self._next_epoch, self._resume_at
        self._next_epoch, self._resume_at = self._epoch + 1, 0
        self._position = start
        self._running += 1
        return self._counted(self._epoch, start, self._running)

    def _counted(self, epoch: int, start: int, iteration: int) -> Iterator[Batch]:
        loaded = self._loaded(epoch, start)
        batches = loaded if self._feed is None else self._feed.deliver(loaded, self._is_ready)
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
            if is_exhaustion(error):
                self.close()
                raise exhaustion(error, self._wanted()) from error
            raise

    @contextmanager
    def _exhaustion_explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_exhaustion(error):
                raise exhaustion(error, self._wanted()) from error
            raise

    def _wanted(self) -> str:
        own = self.settings
        share = -(-own.batch_size // own.world_size)
        batch = share * own.sample_pixels * self.channels * own.dtype.itemsize
        return (
            f"workers={self.workers}, and with batches_ahead={own.batches_ahead} {own.batches_ahead + 1} batches of "
            f"{batch:,} bytes, {share} images of {size_text(own.image_size)} pixels each"
        )

    def shares(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Return this rank's samples for each batch of an epoch, computed when they are used; for repeated ones, see
        `order.epoch.mixed`."""
        own = self.settings
        order = self._order(epoch) if self.order_version > 1 else self._array_order(epoch)
        return Shares(order, own.batch_size, self._last_of(order.count), own.rank, own.world_size)

    def _order(self, epoch: int) -> Order:
        own, near = self.settings, self._near
        kept = _in_place(self._kept) if near else self._kept
        key = {"seed": own.seed, "epoch": epoch}
        if self.selected is not None and self.selected.line is not None:
            if self.order_version > 3:
                given = drawn(kept, self.selected.line, **key, repeats=self.samples, near=near)
            else:
                given = unshuffled(self._by_weight(epoch))
        elif self._parts:
            parts = [_in_place(part) for part in self._parts] if near else self._parts
            given = (spread if near else mixed)(parts, self._weights, **key, samples=self.samples)
        else:
            given = unshuffled(kept)
        if own.order == "random":
            return shuffled(given, **key)
        if own.order == "quasi_random":
            batch = own.batch_size if self.order_version > 2 else None
            return in_runs(given, **key, block=self._block, window=WINDOW * own.batch_size, batch_size=batch)
        return given

    def _array_order(self, epoch: int) -> Order:
        """Return the order of version 1."""
        own, key = self.settings, {"seed": self.settings.seed, "epoch": epoch}
        indices = self.kept
        if self._weights_of_samples is not None:
            indices = self._by_weight(epoch)
        elif self._parts:
            indices = mixed_array(self._parts, self._weights, **key, samples=self.samples)
        pages = require_pages(self.beton).pages if own.order == "quasi_random" else None
        return array_order(indices, order=own.order, **key, batch_size=own.batch_size, pages=pages)

    def _by_weight(self, epoch: int) -> NDArray[np.int64]:
        assert self._weights_of_samples is not None
        return by_weight(
            self.kept, self._weights_of_samples, seed=self.settings.seed, epoch=epoch, repeats=self.samples
        )

    @property
    def _weights_of_samples(self) -> NDArray[np.float64] | None:
        return None if self.selected is None else self.selected.weights

    @property
    def order_version(self) -> int:
        """The version in which this order has last changed: 4 of weights, 3 of quasi-random order, 5 of shares in it,
        else 2; or that of the state of a run that began with an older one."""
        weighted = self._weights_of_samples is not None
        if not self._near:
            return min(self._version, 4 if weighted else 2)
        if weighted or self._parts:
            return 5 if self._version > 4 else 1
        return min(self._version, 3)

    @property
    def _block(self) -> int:
        """How many samples quasi-random order keeps together: about a page of the files with which the run began. Other
        files of the same samples, such as several instead of one, have others on a page."""
        return self._kept_block or require_pages(self.beton).samples_on_a_page

    @property
    def _near(self) -> bool:
        """Whether the file is read in runs."""
        return self.settings.order == "quasi_random"

    @property
    def indices(self) -> NDArray[np.int64]:
        """The samples of the data set that are used, `(n,)`."""
        return as_array(self._indices)

    @property
    def kept(self) -> NDArray[np.int64]:
        """The samples of the following epochs, `(n,)`: `indices`, or those of them that `keep` was given."""
        return as_array(self._kept)

    def set_indices(self, indices: Any) -> None:
        """Set the samples of the following epochs; None selects the full data set.

        Raises:
            DataError: if an index is out of range, there are too few for a batch, or the crop cannot take one's image.
        """
        chosen = used_samples(indices, self.samples)
        self._check_sizes(self.settings, chosen)
        self._check_count(chosen)
        parts = [between(chosen, first, end) for _, first, end in self._weighted]
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
        self._indices: Samples = chosen
        self._kept: Samples = chosen
        self._parts: list[Samples] = parts
        self.selected: Selection | None = None
        """What `select` was given, until the indices are set again."""

    def _check_sizes(self, settings: LoaderOptions, chosen: Samples) -> None:
        """Raise DataError for a sample whose image the crop in training cannot take; see also `BetonFiles.lazy`."""
        beton = self.beton
        if beton is not None and settings.train and not beton.lazy:
            numbers = as_array(chosen)
            for _, own in settings.groups:
                check_sizes(own, beton.heights[numbers], beton.widths[numbers], beton.name, numbers)

    def _check_count(self, chosen: Samples) -> None:
        """Raise DataError if there are too few samples for a batch."""
        own = self.settings
        full = (own.train or own.drop_last) and not own.pad_last
        check_batch_size(own.batch_size, len(chosen), full=full, world_size=own.world_size)

    @property
    def frequencies(self) -> NDArray[np.float64]:
        """How often each of `indices` is trained on, relative to the others, `(n,)`."""
        of_parts = self._weights if self._parts else ()
        return frequencies(self.indices, self._parts, of_parts, self._weights_of_samples)

    def some(self, count: int) -> NDArray[np.int64]:
        """Return samples evenly taken from `indices`, the first and the last among them, `(count,)`."""
        places = np.linspace(0, len(self._indices) - 1, count)
        return taken(self._indices, places.astype(np.int64))

    def count(self, mask: NDArray[np.bool_]) -> int:
        """Return how many of `indices` are True in a mask of all samples of the data set `(N,)`."""
        return count_marked(self._indices, mask)

    def keep(self, indices: Any) -> None:
        """Leave all but these of `indices` out of the following epochs (data pruning); None: none. A Boolean mask of
        all samples of the data set `(N,)` needs a bit for each: of `indices`, in their order, it keeps the true ones.

        The data set of `state_dict` stays the same: a position continues if the same samples are kept.

        Raises:
            DataError: if one is not among `indices`, there are too few for a batch, or samples have shares (`select`,
                the weights of a mix), which pruning would change.
        """
        if indices is None:
            self._kept = self._indices
            return
        if self._parts or self._weights_of_samples is not None:
            raise DataError(
                "keep() would change the shares of an epoch, which balance= or the weights of a mix set. Leave one out."
            )
        given = np.asarray(indices)
        chosen: Samples
        if given.dtype == np.bool_:
            if given.shape != (self.samples,):
                raise DataError(
                    f"keep(): a mask has true or false for each of the {self.samples} samples of the data set, but "
                    f"this one has shape {given.shape}."
                )
            chosen = marked(self._indices, given)
        else:
            chosen = listed = check_indices(indices, self.samples)
            used = np.zeros(self.samples, np.bool_)
            used[self.indices] = True
            if not used[listed].all():
                raise DataError(
                    f"keep(): sample {listed[~used[listed]][0]} is not one of the loader's {len(self._indices)} "
                    "indices. Pass some of them."
                )
        self._check_count(chosen)
        self._kept = chosen

    def selection(self, options: SampleOptions) -> Selection:
        """Return which of the data set's samples the options select."""
        if self.beton is not None:
            return selected(options, self.beton, near=self._near)
        return select(options, self.samples, lambda: self.labels)

    def select(self, selection: Selection) -> None:
        """Train on the samples of a selection, with the shares that it gives them.

        Raises:
            DataError: as `set_indices`; or if the data set is a mix, whose shares are its weights.
        """
        if self._weighted and (selection.parts or selection.weights is not None):
            raise DataError(
                "balance= and the weights of a mix both determine how often a sample is trained on. Leave one out: "
                "'{a,b}.beton' is the same data set without weights."
            )
        self.set_indices(selection.train)
        if selection.parts:
            self._parts, self._weights = list(selection.parts), [1.0] * len(selection.parts)
        self.selected = selection

    def set_image_size(self, image_size: ImageSize) -> None:
        """Set the size of the images for the following epochs (progressive resizing).

        Raises:
            DataError: for an invalid size; a loop already running over the loader raises it at its next batch.
        """
        self._change(dataclasses.replace(self.settings, image_size=image_size))

    def set_policy(self, policy: Mapping[str, Any] | None) -> None:
        """Set the augmentation policy of the following epochs, as the option of that name.

        Raises:
            DataError: for an invalid policy, or from a loader that has none (`StockFFCVLoader`).
        """
        self._change(dataclasses.replace(self.settings, policy=policy))

    def _change(self, changed: LoaderOptions) -> None:
        check_contents(changed, self.beton)
        self._check_sizes(changed, self._indices)
        self.close()
        before, self.settings = self.settings, changed
        try:
            self._prepare()
        except DataError:
            self.settings = before
            raise

    def _prepare(self) -> None:  # noqa: B027  nothing, for most
        """Prepare for changed `settings`; raise DataError if images of their size do not fit into memory."""

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`, beginning with its first batch."""
        epoch = plain(epoch)
        check_whole("epoch", epoch, DataError, 0, 2**63 - 1)
        self._next_epoch, self._resume_at = epoch, 0
        self._epoch, self._position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position: the epoch, and how many of its global batches have been yielded."""
        own, mix = self.settings, {"weights": self._weights} if self._weighted else {}
        block = {"block": self._block} if self._near else {}
        position = {"epoch": self._epoch, "position": self._position, "seed": own.seed}
        data = {"batch_size": own.batch_size, "samples": len(self._indices), "order": own.order}
        return {**position, **data, "order_version": self.order_version, "batches": len(self), **block, **mix}

    def load_state_dict(self, state: dict[str, Any], *, within: bool = False) -> None:
        """Continue right after the last batch of `state`, the result of `state_dict`, also on another number of ranks.

        After the last batch of an epoch, the next loop is the next epoch; `within`: the rest of this one, without a
        batch.

        Raises:
            DataError: if the state has another seed, batch size, order or data set, or if the rest of its epoch cannot
                be shared among these ranks.
        """
        if not isinstance(state, Mapping):
            raise DataError(f"{state!r:.80} is not a loader's state. Pass the result of state_dict().")
        own = {"weights": [], **self.state_dict()}
        # States of older versions lack some, and continue in the order that these had.
        block = {"block": self._block} if self._near else {}
        state = {"batches": len(self), "weights": [], "order_version": 1, **block, **state}
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
        if state["order_version"] not in range(1, NEWEST + 1):
            raise DataError(
                f"The loader's state has order_version={state['order_version']}, and this version of Drivetrain knows "
                f"1 to {NEWEST}. Resume with the version that wrote it, or start a new epoch with set_epoch."
            )
        self._version, self._kept_block = state["order_version"], state.get("block")
        finished = state["position"] >= min(state["batches"], len(self))
        if finished and state["position"] < state["batches"] and not self.settings.drop_last:
            raise DataError(
                f"The loader's state lacks its epoch's last batch, of {len(self._indices) % own['batch_size']} "
                f"samples, which cannot be shared among {self.settings.world_size} ranks. Resume on fewer ranks, or "
                "start an epoch with set_epoch."
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
