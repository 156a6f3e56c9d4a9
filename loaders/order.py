"""The sample order of an epoch, and each rank's shard of it, as pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..common.errors import DataError

WINDOW = 16  # number of batches that quasi-random order mixes: the file is read in runs of this many


def epoch_batches(
    indices: NDArray[np.int64], *, order: str, seed: int, epoch: int, batch_size: int, drop_last: bool,
    pad_last: bool = False, train: bool = True, world_size: int = 1, pages: NDArray[np.int64] | None = None,
) -> list[NDArray[np.int64]]:  # fmt: skip
    """Return the global batches of one epoch as sample indices, independent of the number of workers or ranks. `pages`,
    for quasi-random order, has the page of the file that each sample is on."""
    random = np.random.default_rng([seed, epoch])  # not their sum, FFCV's: seed 2, epoch 0 would repeat 1, 1
    if order == "random":
        indices = random.permutation(indices)
    elif order == "quasi_random":
        pages = require_pages(pages)
        indices = _by_pages(indices, pages[indices % len(pages)], random, WINDOW * batch_size)
    last = last_batch(
        len(indices), batch_size, drop_last=drop_last, pad_last=pad_last, train=train, world_size=world_size
    )
    indices = indices[: len(indices) - last.dropped]
    if last.padded:
        indices = np.concatenate([indices, np.resize(indices, last.padded)])
    starts = range(0, len(indices), batch_size)
    return np.split(indices, starts[1:-1] if last.joined else starts[1:])


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


def require_pages(pages: NDArray[np.int64] | None) -> NDArray[np.int64]:
    if pages is None:
        raise DataError(
            "order='quasi_random' reads a .beton file page by page, but this source has no pages. Set "
            "order='random', or convert it."
        )
    return pages


def mixed(
    parts: Sequence[NDArray[np.int64]], weights: Sequence[float], *, seed: int, epoch: int, samples: int
) -> NDArray[np.int64]:
    """Return the samples of one epoch of a mix, `(n,)`, for `epoch_batches` to shuffle: each data set in `parts` has
    its exact share by weight, and goes through its samples in random order again and again, across epochs."""
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
            rounds.append(random.permutation(part) + (turn - first) * samples)
        whole = np.concatenate(rounds) if rounds else part[:0]
        found.append(whole[start - first * len(part) : end - first * len(part)])
    return np.concatenate(found)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Return `total` samples divided in proportion to the weights, by the largest remainders."""
    exact = np.asarray(weights, dtype=np.float64) * total / np.sum(weights)
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")  # the largest remainder first
    counts[largest[: total - int(counts.sum())]] += 1
    return [int(count) for count in counts]


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


def rank_slice(batch: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.int64]:
    """Return a rank's contiguous shard of a global batch. Of a partial batch the first ranks get one sample more."""
    return np.array_split(batch, world_size)[rank]


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
