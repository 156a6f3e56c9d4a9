"""The order of an epoch, and each rank's share of it, as pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, suggest

ORDERS = ("random", "quasi_random", "sequential")

WINDOW = 16
"""Batches that quasi-random order mixes: the file is read in stretches of so many at a time."""


def epoch_batches(
    indices: NDArray[np.int64],
    *,
    order: str,
    seed: int,
    epoch: int,
    batch_size: int,
    drop_last: bool,
    pad_last: bool = False,
    train: bool = True,
    world_size: int = 1,
    pages: NDArray[np.int64] | None = None,
) -> list[NDArray[np.int64]]:
    """The global batches of one epoch: sample indices, the same for any number of workers or ranks.

    The permutation is keyed by the pair (seed, epoch), not by their sum: with the sum, which FFCV
    uses, seed 2 at epoch 0 repeats seed 1 at epoch 1.

    Args:
        indices: the samples to use, `(n,)`.
        order: one of `ORDERS`.
        seed, epoch: of the permutation.
        batch_size: global.
        drop_last, pad_last, train, world_size: what becomes of a last batch that is not full; see `last_batch`.
        pages: for quasi-random order, the page of the file that each sample lies on, by sample index.
    """
    if order not in ORDERS:
        raise DataError(f"order={order!r} is not an order.{suggest(order, ORDERS)}")
    random = np.random.default_rng([seed, epoch])
    if order == "random":
        indices = random.permutation(indices)
    elif order == "quasi_random":
        indices = _by_pages(indices, require_pages(pages)[indices], random, WINDOW * batch_size)
    last = last_batch(
        len(indices), batch_size, drop_last=drop_last, pad_last=pad_last, train=train, world_size=world_size
    )
    indices = indices[: len(indices) - last.dropped]
    indices = np.concatenate([indices, np.resize(indices, last.padded)]) if last.padded else indices
    starts = list(range(0, len(indices), batch_size))
    starts = starts[:-1] if last.joined else starts
    return np.split(indices, starts[1:])


@dataclass(frozen=True)
class LastBatch:
    """What becomes of an epoch's last batch where it is not full.

    Attributes:
        dropped: samples that are left out.
        padded: samples of the epoch's beginning that are given a second time.
        joined: whether its samples go into the batch before it.
    """

    dropped: int = 0
    padded: int = 0
    joined: bool = False


def last_batch(
    samples: int, batch_size: int, *, drop_last: bool, pad_last: bool, train: bool, world_size: int
) -> LastBatch:
    """Return what becomes of the last batch, of which no rank may have an empty share.

    The mean loss of an empty share is NaN, and the gradients of unequal shares are averaged with unequal weights.
    So training repeats as few samples as make the shares equal, as torch's `DistributedSampler` does. Evaluation
    counts each sample once: fewer samples than ranks join the batch before them.

    Args:
        samples: of the epoch.
        batch_size: global.
        drop_last: leave the last batch out.
        pad_last: fill it up.
        train: whether shares must be equal.
        world_size: number of ranks.
    """
    rest = samples % batch_size
    if rest == 0:
        return LastBatch()
    if drop_last:
        return LastBatch(dropped=rest)
    if pad_last:
        return LastBatch(padded=batch_size - rest)
    if train:
        return LastBatch(padded=-rest % world_size)
    return LastBatch(joined=rest < world_size and samples > batch_size)


def require_pages(pages: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The pages, which quasi-random order needs.

    Raises:
        DataError: if there are none.
    """
    if pages is None:
        raise DataError(
            "order='quasi_random' reads a .beton file page by page, and this source has no pages; "
            "use order='random', or convert it."
        )
    return pages


def _by_pages(
    indices: NDArray[np.int64], pages: NDArray[np.int64], random: np.random.Generator, window: int
) -> NDArray[np.int64]:
    """The samples in stretches of whole pages, `window` samples or a little more each, mixed within.

    The pages are in random order, so that each epoch has other neighbours. FFCV's order of that name does
    much the same, but for one process only.
    """
    _, page, counts = np.unique(pages, return_inverse=True, return_counts=True)
    shuffled = random.permutation(len(counts))
    before = np.cumsum(counts[shuffled]) - counts[shuffled]
    stretch = np.empty(len(counts), dtype=np.int64)
    stretch[shuffled] = before // window
    order: NDArray[np.int64] = indices[np.lexsort((random.random(len(indices)), stretch[page]))]
    return order


def rank_slice(batch: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.int64]:
    """A rank's contiguous share of a global batch.

    A full batch divides evenly (`check_batch_size` requires it). Of a last, partial one the first ranks
    take one sample more.
    """
    return np.array_split(batch, world_size)[rank]


def check_batch_size(batch_size: int, samples: int, *, full: bool, world_size: int) -> None:
    """Refuses a global batch size that cannot be used.

    Raises:
        DataError: if it is not positive, does not divide by the number of ranks, or exceeds the
            number of samples where a `full` batch is needed: in training, and with drop_last; or if there are
            fewer samples than ranks.
    """
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} must be at least 1.")
    if batch_size % world_size:
        raise DataError(
            f"batch_size={batch_size} is global and does not divide by {world_size} ranks; "
            f"use {max(batch_size - batch_size % world_size, world_size)}."
        )
    if full and batch_size > samples:
        raise DataError(
            f"batch_size={batch_size} is larger than the data set of {samples} samples, so no full "
            f"batch exists; use at most {samples}."
        )
    if samples < world_size:
        raise DataError(
            f"{samples} samples cannot be shared by {world_size} ranks: each needs at least one. Use fewer ranks, or "
            "load them on one rank alone, with rank=0 and world_size=1."
        )
