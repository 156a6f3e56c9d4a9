"""The order of an epoch, and each rank's share of it, as pure functions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, suggest

ORDERS = ("random", "sequential")


def epoch_batches(
    indices: NDArray[np.int64], *, order: str, seed: int, epoch: int, batch_size: int, drop_last: bool
) -> list[NDArray[np.int64]]:
    """The global batches of one epoch: sample indices, the same for any number of workers or ranks.

    The permutation is keyed by the pair (seed, epoch), not by their sum: with the sum, which FFCV
    uses, seed 2 at epoch 0 repeats seed 1 at epoch 1.
    """
    if order not in ORDERS:
        raise DataError(f"order={order!r} is not an order.{suggest(order, ORDERS)}")
    if order == "random":
        indices = np.random.default_rng([seed, epoch]).permutation(indices)
    stop = len(indices) - len(indices) % batch_size if drop_last else len(indices)
    return [indices[start : start + batch_size] for start in range(0, stop, batch_size)]


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
