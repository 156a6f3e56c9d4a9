"""The order of version 1, and of weights up to version 3, by arrays of all samples: for checkpoints of runs that began
with them, those of shares (`balance=`, weights of a mix) in quasi-random order up to version 4."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .batches import WINDOW, Indices, Order, Samples, as_array, shares


def array_order(
    indices: Indices, *, order: str, seed: int, epoch: int, batch_size: int, pages: Indices | None = None
) -> Order:
    """Return the samples `(n,)` in the order of an epoch. `pages`, for quasi-random order, has the page of the file
    that each sample of the data set is on."""
    random = np.random.default_rng([seed, epoch])  # not their sum, FFCV's: seed 2, epoch 0 would repeat 1, 1
    if order == "random":
        indices = random.permutation(indices)
    elif order == "quasi_random":
        assert pages is not None
        indices = _by_pages(indices, pages[indices % len(pages)], random, WINDOW * batch_size)
    return Order(len(indices), indices.__getitem__)


def mixed_array(parts: Sequence[Samples], weights: Sequence[float], *, seed: int, epoch: int, samples: int) -> Indices:
    """Return the samples of one epoch of a mix, `(n,)`, for `array_order` to shuffle: as `epoch.mixed`."""
    counts = shares(sum(map(len, parts)), weights)
    found = []
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        start, end = epoch * count, (epoch + 1) * count
        first, last = start // len(part), -(-end // len(part))
        rounds = []
        for turn in range(first, last):
            # A key that no epoch's own permutation has: spawn keys are separate from the entropy.
            random = np.random.default_rng(np.random.SeedSequence([seed, turn], spawn_key=(number,)))
            # Each repetition in an epoch is a multiple of `samples` higher, for an augmentation of its own.
            rounds.append(random.permutation(as_array(part)) + (turn - first) * samples)
        whole = np.concatenate(rounds) if rounds else np.empty(0, np.int64)
        found.append(whole[start - first * len(part) : end - first * len(part)])
    return np.concatenate(found)


def by_weight(samples: Indices, weights: NDArray[np.float64], *, seed: int, epoch: int, repeats: int) -> Indices:
    """Return as many samples as there are, `(n,)`, each in proportion to its weight: as `epoch.drawn`, on a line in
    random order."""
    random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(len(samples),)))
    order = random.permutation(len(samples))
    offset = (random.random() + epoch * ((5**0.5 - 1) / 2)) % 1
    ends = np.cumsum(weights[order] / weights.max())
    ends = ends * (len(samples) / ends[-1])
    ends[-1] = len(samples)
    counts = np.diff(np.floor(ends + offset).astype(np.int64), prepend=0)
    return np.concatenate([samples[order[counts > k]] + k * repeats for k in range(int(counts.max()))])


def _by_pages(
    indices: NDArray[np.int64], pages: NDArray[np.int64], random: np.random.Generator, window: int
) -> NDArray[np.int64]:
    """Return the samples in runs of complete pages, in random order, of at least `window` samples each, mixed within.
    FFCV's order of the same name is similar, but for a single process only."""
    _, page, counts = np.unique(pages, return_inverse=True, return_counts=True)
    shuffled = random.permutation(len(counts))
    before = np.cumsum(counts[shuffled]) - counts[shuffled]
    stretch = np.empty(len(counts), dtype=np.int64)
    stretch[shuffled] = before // window
    order: NDArray[np.int64] = indices[np.lexsort((random.random(len(indices)), stretch[page]))]
    return order
