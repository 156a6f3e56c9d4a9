"""The order of an epoch: the sample at each position is computed by itself, so that a rank of ten thousand computes its
share, and holds some thousand of it at a time, whatever the size of the data set."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .batches import Indices, Order, Samples, shares, taken
from .permutation import key_of, permuted, permuted_each, subkeys

NEWEST = 5
"""The version of the order of new runs. A loader's state has its own; without one, it is 1 (`arrays`).
Version 3 differs from 2 in quasi-random order only: `in_runs`. Version 4 differs from it in weights only: `drawn`.
Version 5 differs in shares in quasi-random order only, `spread` and `drawn` near by, whose version was 1 before."""

_SHUFFLE, _WITHIN, _BLOCKS, _MIX, _TURN, _DRAW, _LINE, _NEAR = range(8)  # uses of one seed and epoch

_AT_ONCE = 1 << 18  # weights put on a line at a time
_BITS = 30
UNIT = 1 << _BITS
"""The distance of two points on the line of `drawn`. In whole numbers, each point is in exactly one piece."""
_STEP = 663_608_941  # what the points move by from epoch to epoch: UNIT times the golden ratio's fraction, 0.618
_STRETCH = 64  # samples that follow each other in the file, and change places on a line that is near to its order


def unshuffled(samples: Samples) -> Order:
    """Return the samples in their own order."""
    return Order(len(samples), lambda positions: taken(samples, positions))


def shuffled(given: Order, *, seed: int, epoch: int) -> Order:
    """Return the samples in random order."""
    key = key_of(seed, epoch, purpose=_SHUFFLE)
    return Order(given.count, lambda positions: given.at(permuted(positions, given.count, key)))


def in_runs(given: Order, *, seed: int, epoch: int, block: int, window: int, batch_size: int | None = None) -> Order:
    """Return the samples block by block in random order, mixed among the blocks of about `window` samples.

    A block is so many samples that follow each other in the file; the last one may be shorter, and comes anywhere. With
    `batch_size`, the window is spread over its batches: neighbours in its blocks are at one place in different batches.
    Each batch then has its share of each block, and each rank's slices of the batches are one run of the blocks, for
    any number of ranks, so that together the ranks read the file once. Without (version 2), the window is permuted.
    """
    n, block = given.count, min(block, given.count)
    blocks = -(-n // block)
    each = -(-window // block)  # blocks in a window
    within, among, turns = (key_of(seed, epoch, purpose=use) for use in (_WITHIN, _BLOCKS, _TURN))
    # The slot of the last block, among those of all blocks, and by how much it is shorter.
    slot, missing = int(among) % blocks, blocks * block - n

    def start(slots: Indices) -> Indices:
        return slots * block - missing * (slots > slot)

    def slots_of(positions: Indices) -> Indices:
        return (positions + missing * (positions >= (slot + 1) * block - missing)) // block

    def at(positions: Indices) -> Indices:
        first = slots_of(positions) // each * each
        starts = start(first)
        sizes = start(np.minimum(first + each, blocks)) - starts
        keys = subkeys(within, first)
        if batch_size is None:
            moved = permuted_each(positions - starts, sizes, keys)
        else:
            moved = _spread(positions, starts, sizes, keys, batch_size)
            # Which rank reads which part of a window differs in each.
            moved = (moved + (subkeys(turns, first) % sizes.view(np.uint64)).view(np.int64)) % sizes
        moved += starts
        slots = slots_of(moved)
        numbers = np.full_like(slots, blocks - 1)
        full = slots != slot
        numbers[full] = permuted(slots[full] - (slots[full] > slot), max(blocks - 1, 1), among)
        return given.at(numbers * block + moved - start(slots))

    return Order(n, at)


def _spread(positions: Indices, starts: Indices, sizes: Indices, keys: NDArray[np.uint64], batch_size: int) -> Indices:
    """Return the places in their windows of the positions, sorted by the place in the batch; those of one place, one in
    each batch, are permuted."""
    places = positions % batch_size

    def below(ends: Indices, place: Indices) -> Indices:
        """Return how many positions below the ends are at an earlier place in their batch."""
        return ends // batch_size * place + np.minimum(ends % batch_size, place)

    before, after = (below(starts + sizes, place) - below(starts, place) for place in (places, places + 1))
    batches = positions // batch_size - (starts + batch_size - 1 - places) // batch_size
    return before + permuted_each(batches, after - before, subkeys(keys, places))


def mixed(parts: Sequence[Samples], weights: Sequence[float], *, seed: int, epoch: int, samples: int) -> Order:
    """Return the samples of one epoch of a mix, to be shuffled: each data set in `parts` has its exact share by weight,
    and goes through its samples in random order again and again, across epochs.

    Each repetition of a sample in an epoch is a multiple of `samples` higher, for an augmentation of its own.
    """
    counts = shares(sum(map(len, parts)), weights)
    ends, sizes, keys = np.cumsum(counts), np.array([*map(len, parts)]), _keys_of_parts(seed, len(parts))
    # Of each part: rounds of it before this epoch, and from a position to the place in the next round.
    rounds = [divmod(epoch * count, max(len(part), 1)) for part, count in zip(parts, counts, strict=True)]
    before = np.array([turns % 2**64 for turns, _ in rounds], np.uint64)
    starts = np.array([start for _, start in rounds]) + counts - ends

    def at(positions: Indices) -> Indices:
        numbers = np.searchsorted(ends, positions, side="right")
        turns, places = np.divmod(positions + starts[numbers], sizes[numbers])
        own = subkeys(keys[numbers], turns.astype(np.uint64) + before[numbers])
        places = permuted_each(places, sizes[numbers], own)
        return turns * samples + _of_parts(parts, numbers, places)

    return Order(int(ends[-1]), at)


def spread(parts: Sequence[Samples], weights: Sequence[float], *, seed: int, epoch: int, samples: int) -> Order:
    """Return the samples of one epoch of a mix near to their order in the file, for `in_runs`: each data set in `parts`
    has its exact share by weight, of samples at equal distances.

    From epoch to epoch their places move by the share, so that, as in `mixed`, each sample of a data set is trained on
    equally often, up to once. Its k-th repetition in an epoch, from 0, is k · `samples` higher.
    """
    counts, sizes = shares(sum(map(len, parts)), weights), [*map(len, parts)]
    keys = _keys_of_parts(seed, len(parts)).tolist()
    starts = [(key + epoch * count) % size for key, count, size in zip(keys, counts, sizes, strict=True)]
    exact = object if max(map(operator.mul, counts, sizes)) >= 1 << 62 else np.int64  # of 2 billion samples and more
    ends, of_parts = np.cumsum(counts), np.array([counts, sizes, starts], exact)

    def at(positions: Indices) -> Indices:
        numbers = np.searchsorted(ends, positions, side="right")
        count, size, offset = of_parts[:, numbers]
        own = positions - ends[numbers] + count
        places = (own * size + offset) // count
        turns = own + (offset - places * count) // size  # after the first position that has this place
        places, turns, size = (each.astype(np.int64, copy=False) for each in (places, turns, size))
        found: Indices = turns * samples + _of_parts(parts, numbers, _near(places, size))
        return found

    return Order(int(ends[-1]), at)


def _of_parts(parts: Sequence[Samples], numbers: Indices, places: Indices) -> Indices:
    """Return the samples at the places in their parts; all arrays are `(k,)`."""
    found, grouped = np.empty_like(places), np.argsort(numbers, kind="stable")
    here, first = np.unique(numbers[grouped], return_index=True)
    for number, group in zip(here.tolist(), np.split(grouped, first[1:]), strict=False):  # of no positions, none
        found[group] = taken(parts[number], places[group])
    return found


@lru_cache(maxsize=4)
def _keys_of_parts(seed: int, count: int) -> NDArray[np.uint64]:
    """Kept, because a data set with a share for each of 20,000 classes has as many, which take a second."""
    return np.array([key_of(seed, number, purpose=_MIX) for number in range(count)], np.uint64)


def line_of(weights: NDArray[np.float64], *, near: bool = False) -> Indices:
    """Return where the pieces end `(n,)` on a line of length n · UNIT, on which each sample has a piece in proportion
    to its weight, in the order of `_on_line`; those of weight 0 have none."""
    n, largest = len(weights), weights.max()
    ends = np.empty(n)
    for start in range(0, n, _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, n))
        ends[places] = weights[_on_line(places, n, near)] / largest
    np.cumsum(ends, out=ends)
    whole = n * UNIT
    line: Indices = np.minimum(np.rint(ends * (whole / ends[-1])).astype(np.int64), whole)
    line[np.searchsorted(ends, ends[-1]) :] = whole
    return line


def _on_line(places: Indices, n: int, near: bool) -> Indices:
    """Return the samples at the places of the line: in random order, because in that of a file whose classes take turns
    an epoch would have all samples of a class, or none. With any seed the same, so that runs share the line."""
    return _near(places, np.full_like(places, n)) if near else permuted(places, n, key_of(n, purpose=_LINE))


def _near(places: Indices, sizes: Indices) -> Indices:
    """Return the places after those of each `_STRETCH` have been permuted; `sizes`: how many there are of each one's
    kind."""
    starts = places // _STRETCH * _STRETCH
    keys = subkeys(key_of(purpose=_NEAR), starts)
    return starts + permuted_each(places - starts, np.minimum(_STRETCH, sizes - starts), keys)


def drawn(
    samples: Samples, line: Indices, *, seed: int, epoch: int, repeats: int, near: bool = False
) -> Order:  # fmt: skip
    """Return as many samples as there are, each in proportion to its weight: systematic sampling.

    A sample is drawn once for each of n points, UNIT apart, that are within its piece of the `line`: its share, rounded
    up or down. From epoch to epoch the points move by the golden ratio, so that the mean over the epochs is the share
    itself.

    A sample's k-th draw in an epoch, from 0, is k · `repeats` higher, for an augmentation of its own. `near`, as of the
    line: in about the order of the file, for `in_runs`.
    """
    start = int(key_of(seed, purpose=_DRAW)) % UNIT
    offset = (start + epoch * _STEP) % UNIT

    def at(positions: Indices) -> Indices:
        places = np.searchsorted(line, (positions + 1) * UNIT - offset)
        before = np.where(places > 0, line[places - 1], 0)  # where the piece begins
        chosen = taken(samples, _on_line(places, len(line), near))
        found: Indices = chosen + (positions - ((before + offset) >> _BITS)) * repeats
        return found

    return Order(len(line), at)
