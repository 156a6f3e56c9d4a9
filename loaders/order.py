"""The order of an epoch, and each rank's share of it, as pure functions."""

from __future__ import annotations

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
        drop_last: leave out a last batch that is not full.
        pad_last: fill it up with the epoch's first samples.
        pages: for quasi-random order, the page of the file that each sample lies on, by sample index.
    """
    if order not in ORDERS:
        raise DataError(f"order={order!r} is not an order.{suggest(order, ORDERS)}")
    random = np.random.default_rng([seed, epoch])
    if order == "random":
        indices = random.permutation(indices)
    elif order == "quasi_random":
        indices = _by_pages(indices, require_pages(pages)[indices], random, WINDOW * batch_size)
    rest = len(indices) % batch_size
    if rest and drop_last:
        indices = indices[: len(indices) - rest]
    elif rest and pad_last:
        indices = np.concatenate([indices, np.resize(indices, batch_size - rest)])
    return [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]


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

    A full batch divides evenly (`check_batch_size` sees to it). Of a last, partial one the first ranks
    take one sample more; no sample is repeated or lost, and a share may be empty.
    """
    return np.array_split(batch, world_size)[rank]


def check_batch_size(batch_size: int, samples: int, *, full: bool, world_size: int) -> None:
    """Refuses a global batch size that cannot be used.

    Raises:
        DataError: if it is not positive, does not divide by the number of ranks, or exceeds the
            number of samples where a `full` batch is needed: in training, and with drop_last.
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
