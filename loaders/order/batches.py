"""The batches of an epoch, and each rank's shard of them, by arithmetic on the positions in the epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ...common.errors import DataError

Indices = NDArray[np.int64]

WINDOW = 16  # number of batches that quasi-random order mixes: the file is read in runs of this many
_AT_ONCE = 1 << 14  # samples computed at a time: enough that NumPy's calls cost nothing, few for the cache


@dataclass(frozen=True)
class LastBatch:
    """What happens to an epoch's last batch if it is not full."""

    dropped: int = 0
    padded: int = 0  # number of samples from the beginning of the epoch that are repeated
    joined: bool = False  # with the previous batch


def last_batch(
    samples: int, batch_size: int, *, drop_last: bool, pad_last: bool, train: bool, world_size: int
) -> LastBatch:
    """Return what happens to the last batch; no rank may get an empty shard, whose mean loss is NaN. Evaluation counts
    each sample once: fewer samples than ranks are merged into the previous batch."""
    rest = samples % batch_size
    if rest == 0:
        return LastBatch()
    if drop_last:
        return LastBatch(dropped=rest)
    if pad_last:
        return LastBatch(padded=batch_size - rest)
    if train:  # equal shards, as torch's `DistributedSampler`: gradients are averaged with equal weights
        return LastBatch(padded=-rest % world_size)
    return LastBatch(joined=rest < world_size and samples > batch_size)


@dataclass(frozen=True)
class Order:
    """The samples of an epoch in order: `count` of them, `at` these positions `(n,)`."""

    count: int
    at: Callable[[Indices], Indices]


class Shares(Sequence[Indices]):
    """A rank's samples for each batch of an epoch `(n,)`, computed when they are used, some thousand at a time.

    A rank's share is a contiguous slice of the batch; of a partial batch the first ranks get one sample more.
    """

    def __init__(
        self, order: Order, batch_size: int, last: LastBatch, rank: int, world_size: int,
        numbers: range | None = None,
    ) -> None:  # fmt: skip
        self._order, self._last, self._rank, self._world = order, last, rank, world_size
        self._batch = batch_size
        self._end = order.count - last.dropped + last.padded
        every = range(max(-(-self._end // batch_size) - last.joined, 0))
        self._all = len(every)
        self._numbers = every if numbers is None else numbers
        self._per_block = max(_AT_ONCE * world_size // batch_size, 1)
        self._block, self._computed = -1, list[Indices]()  # the number of the last block, and its batches

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> Indices: ...
    @overload
    def __getitem__(self, number: slice) -> Shares: ...
    def __getitem__(self, number: int | slice) -> Indices | Shares:
        if isinstance(number, slice):
            some = self._numbers[number]
            return Shares(self._order, self._batch, self._last, self._rank, self._world, some)
        block, place = divmod(self._numbers[number], self._per_block)
        if block != self._block:
            self._computed, self._block = self._compute(block), block
        return self._computed[place]

    def _compute(self, block: int) -> list[Indices]:
        first = block * self._per_block
        spans = [self._span(each) for each in range(first, min(first + self._per_block, self._all))]
        positions = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])
        ends = np.cumsum([end - start for start, end in spans[:-1]])
        return np.split(self._order.at(positions % self._order.count), ends)

    def _span(self, number: int) -> tuple[int, int]:
        """Return the first position in the epoch of this rank's share of a batch, and its end."""
        start = number * self._batch
        end = self._end if number == self._all - 1 else start + self._batch
        each, more = divmod(end - start, self._world)
        own = start + self._rank * each + min(self._rank, more)
        return own, own + each + (self._rank < more)


class Rest:
    """All of so many samples but those `left_out` `(m,)`, sorted, in order: of these alone there is an array. The first
    sample is number `start`; those left out are counted from it."""

    def __init__(self, samples: int, left_out: Indices, before: Indices | None = None, start: int = 0) -> None:
        self.samples, self.left_out, self.start = samples, left_out, start
        self.before = left_out - np.arange(len(left_out)) if before is None else before
        """How many of the others are before each that is left out, `(m,)`."""

    def __len__(self) -> int:
        return self.samples - len(self.left_out)

    def at(self, positions: Indices) -> Indices:
        found: Indices = positions + np.searchsorted(self.before, positions, side="right") + self.start
        return found


_ROW = 64  # bytes of marks that are counted together
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # the bits of each byte, (256, 8)
_COUNTS, _PLACES = _ONES.sum(1, dtype=np.uint8), np.argsort(~_ONES.astype(np.bool_), axis=1, kind="stable")
"""How many bits of a byte are set `(256,)`; where these are, and then the others `(256, 8)`."""


class Marked:
    """The samples whose mark in a mask `(N,)` is set, in order: a bit for each sample, and their number before each
    512. ("Rank and select" of succinct data structures: Jacobson 1989, "Space-efficient static trees and graphs")."""

    def __init__(self, mask: NDArray[np.bool_]) -> None:
        packed = np.packbits(mask)
        self._bits = np.pad(packed, (0, -len(packed) % _ROW)).reshape(-1, _ROW)
        counts = np.add.reduceat(mask, np.arange(0, len(mask), 8 * _ROW), dtype=np.int64)
        self._before, self._count = np.cumsum(counts) - counts, int(counts.sum())

    def __len__(self) -> int:
        return self._count

    def every(self) -> Indices:
        """Return all of them, `(n,)`: `at` takes hundreds of bytes for each."""
        return np.flatnonzero(np.unpackbits(self._bits)).astype(np.int64, copy=False)

    def at(self, positions: Indices) -> Indices:
        rows = np.searchsorted(self._before, positions, side="right") - 1
        left, own = positions - self._before[rows], self._bits[rows]
        until = np.cumsum(_COUNTS[own], axis=1, dtype=np.uint16)
        place = (until > left[:, None]).argmax(1)
        every = np.arange(len(rows))
        value = own[every, place]
        left = left - until[every, place] + _COUNTS[value]
        found: Indices = (rows * _ROW + place) * 8 + _PLACES[value, left]
        return found


Samples = Indices | range | Rest | Marked
"""Samples in order: an array `(n,)`, or without one those of a range with step 1, all but some, or the marked ones."""


def marked(samples: Samples, mask: NDArray[np.bool_]) -> Samples:
    """Return those of the samples whose mark in a mask of all samples `(N,)` is set, in the order of the samples."""
    if isinstance(samples, np.ndarray):
        return samples[mask[samples]]
    if isinstance(samples, range):
        own = np.zeros_like(mask)
        own[samples.start : samples.stop] = mask[samples.start : samples.stop]
    else:
        assert isinstance(samples, Rest)
        own = mask.copy()
        own[samples.left_out] = False
    return Marked(own)


def count_marked(samples: Samples, mask: NDArray[np.bool_]) -> int:
    """Return how many of the samples have their mark set."""
    if isinstance(samples, Rest):
        return int(np.count_nonzero(mask) - np.count_nonzero(mask[samples.left_out]))
    assert not isinstance(samples, Marked)
    return int(np.count_nonzero(mask[samples.start : samples.stop] if isinstance(samples, range) else mask[samples]))


def taken(samples: Samples, positions: Indices) -> Indices:
    """Return the samples at the positions `(n,)`."""
    if isinstance(samples, Rest | Marked):
        return samples.at(positions)
    return positions + samples.start if isinstance(samples, range) else samples[positions]


def as_array(samples: Samples) -> Indices:
    """Return the samples as an array `(n,)`."""
    if isinstance(samples, np.ndarray):
        return samples
    if isinstance(samples, Marked):
        return samples.every()
    return taken(samples, np.arange(len(samples), dtype=np.int64))


def between(samples: Samples, first: int, end: int) -> Samples:
    """Return those of the samples from `first` to before `end`."""
    if isinstance(samples, range):
        return range(max(samples.start, first), min(samples.stop, end))
    if isinstance(samples, Rest):
        low, high = np.searchsorted(samples.left_out, (first - samples.start, end - samples.start))
        return Rest(end - first, samples.left_out[low:high] + samples.start - first, start=first)
    array = as_array(samples)
    return array[(array >= first) & (array < end)]


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Return `total` samples divided in proportion to the weights, by the largest remainders."""
    exact = np.asarray(weights, dtype=np.float64) * total / np.sum(weights)
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")  # the largest remainder first
    counts[largest[: total - int(counts.sum())]] += 1
    return [int(count) for count in counts]


def check_batch_size(batch_size: int, samples: int, *, full: bool, world_size: int) -> None:
    """Raise DataError for an invalid global batch size; a `full` batch is required in training, and with drop_last."""
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} must be at least 1.")
    if batch_size % world_size:
        raise DataError(
            f"batch_size={batch_size} is global and not divisible by {world_size} ranks. Set it to "
            f"{max(batch_size - batch_size % world_size, world_size)}."
        )
    if full and batch_size > samples:
        raise DataError(
            f"batch_size={batch_size} is larger than the data set of {samples} samples, so there is no full batch. "
            f"Set it to at most {samples}."
        )
    if samples < world_size:
        raise DataError(
            f"{samples} samples cannot be shared among {world_size} ranks: each needs at least one. Use fewer ranks, "
            "or load them on one rank only, with rank=0 and world_size=1."
        )
