"""Which samples are trained on, and which are held out: functions of a seed and the samples' numbers and labels.

A sample's draw is a hash of (seed, number), so that the choice depends on neither ranks, workers, batch size nor the
order in which anything is read. Where the labels are class indices, each class gets its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..common.errors import DataError

Indices = NDArray[np.int64]


def draws(samples: Indices, seed: int) -> NDArray[np.uint64]:
    """Return a pseudo-random number for each sample `(n,)`: SplitMix64 (Steele et al. 2014, "Fast splittable
    pseudorandom number generators") of the seed and its number."""
    return _mixed(_mixed(np.array([seed], np.uint64)) ^ _mixed(samples.astype(np.uint64)))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def classes_of(labels: NDArray[Any] | None, samples: Indices) -> NDArray[np.int64] | None:
    """Return the class of each sample `(n,)`; None if the labels `(N,)` are not class indices: of masks (None),
    vectors and floats."""
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu":
        return None
    return labels[samples].astype(np.int64)


def held_out(
    samples: Indices, classes: NDArray[np.int64] | None, share: float, seed: int
) -> NDArray[np.bool_]:
    """Return which samples `(n,)` to hold out: `share` of them, rounded to a sample, and of each class.

    The shares of the classes are rounded by the largest remainders; each keeps a sample to train on.

    Raises:
        DataError: if no sample would be held out, or none trained on.
    """
    wanted = round(len(samples) * share)
    groups = np.zeros(len(samples), np.int64) if classes is None else classes
    names, counts = np.unique(groups, return_counts=True)
    exact = counts * share
    quota = np.minimum(np.floor(exact).astype(np.int64), counts - 1)
    room = np.where(
        quota < counts - 1, quota - exact, np.inf
    )  # the largest remainder first; inf: not one more
    for at in np.argsort(room, kind="stable")[: max(wanted - int(quota.sum()), 0)]:
        quota[at] += np.isfinite(room[at])
    if not quota.any():
        raise DataError(
            f"val_split={share:g} holds out none of {len(samples)} samples: each class keeps one to train on. Raise "
            "it, or pass val=."
        )
    place = _places(groups, draws(samples, seed))
    chosen: NDArray[np.bool_] = place < quota[np.searchsorted(names, groups)]
    return chosen


def folds_of(samples: Indices, classes: NDArray[np.int64] | None, folds: int, seed: int) -> Indices:
    """Return the fold of each sample, `(n,)` from 0: equally many in each, and of each class, up to one sample.

    A class's only sample is in none (-1), and so always trained on.

    Raises:
        DataError: if there are more folds than samples.
    """
    if folds > len(samples):
        raise DataError(f"folds={folds} is more than the {len(samples)} samples. Use fewer folds.")
    groups = np.zeros(len(samples), np.int64) if classes is None else classes
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    alone = counts[inverse] == 1 if classes is not None else np.zeros(len(samples), np.bool_)
    order = np.lexsort((draws(samples, seed), groups, alone))
    fold = np.empty(len(samples), np.int64)
    fold[order] = np.arange(len(samples)) % folds  # classes one after the other: the next one goes on
    fold[alone] = -1
    return fold


def few(samples: Indices, classes: NDArray[np.int64] | None, per_class: int, seed: int) -> Indices:
    """Return `per_class` samples of each class, in order.

    Raises:
        DataError: if the labels are not class indices, or a class has fewer.
    """
    if classes is None:
        raise DataError(
            f"per_class={per_class} needs labels that are class indices, but these are not. Use limit= instead."
        )
    names, counts = np.unique(classes, return_counts=True)
    if counts.min() < per_class:
        at = int(np.argmin(counts))
        raise DataError(
            f"per_class={per_class}: class {names[at]} has only {counts[at]} samples to train on. Set it to at most "
            f"{counts[at]}."
        )
    return samples[_places(classes, draws(samples, seed)) < per_class]


def limited(samples: Indices, classes: NDArray[np.int64] | None, limit: int, seed: int) -> Indices:
    """Return at most `limit` samples, in order: of each class its share, up to one sample."""
    if limit >= len(samples):
        return samples
    random = draws(samples, seed)
    if classes is None:
        return np.sort(samples[np.argsort(random, kind="stable")[:limit]])
    # The k-th of n samples of a class is at (k + 1/2) / n on a line that is the same for all classes: its first part
    # has of each class its share.
    _, inverse, counts = np.unique(classes, return_inverse=True, return_counts=True)
    line = (_places(classes, random) + 0.5) / counts[inverse]
    return np.sort(samples[np.lexsort((random, line))[:limit]])


def _places(groups: NDArray[np.int64], random: NDArray[np.uint64]) -> Indices:
    """Return the place of each sample among those of its group, by its draw, from 0."""
    order = np.lexsort((random, groups))
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order[0]] - 1))
    place = np.empty(len(groups), np.int64)
    place[order] = np.arange(len(groups)) - np.repeat(starts, np.diff([*starts, len(groups)]))
    return place


def by_class(samples: Indices, classes: NDArray[np.int64]) -> list[Indices]:
    """Return the samples of each class, which `order.mixed` gives equal shares."""
    order = np.argsort(classes, kind="stable")
    return np.split(samples[order], np.flatnonzero(np.diff(classes[order])) + 1)


def by_weight(
    samples: Indices, weights: NDArray[np.float64], *, seed: int, epoch: int, repeats: int
) -> Indices:
    """Return as many samples as there are, `(n,)`, each in proportion to its weight: systematic sampling.

    On a line of length n, each sample has a piece in proportion to its weight, and is drawn once for each of n points
    at equal distances within it: its share, rounded up or down. From epoch to epoch the points move by the golden
    ratio, so that the mean over the epochs is the share itself.

    Args:
        samples: `(n,)`.
        weights: of each, not negative, of any sum.
        seed: of the line's order and the first epoch's points.
        epoch: from 0.
        repeats: of a sample's k-th draw in an epoch, k times this number is added to its index, so that each has its
            own augmentation.
    """
    random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(len(samples),)))
    order = random.permutation(len(samples))
    offset = (random.random() + epoch * ((5**0.5 - 1) / 2)) % 1
    ends = np.cumsum(weights[order] / weights.max())
    ends = ends * (len(samples) / ends[-1])
    ends[-1] = len(samples)
    counts = np.diff(np.floor(ends + offset).astype(np.int64), prepend=0)
    return np.concatenate([samples[order[counts > k]] + k * repeats for k in range(int(counts.max()))])


def check_weights(weights: Sequence[float] | NDArray[Any], samples: int) -> NDArray[np.float64]:
    """Return weights of all samples as an array `(N,)`.

    Raises:
        DataError: if there are more or fewer, or one is negative or not finite, or all are 0.
    """
    array = np.asarray(weights, np.float64)
    if array.shape != (samples,):
        raise DataError(f"balance has {array.size} weights, but the data set has {samples} samples.")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise DataError(
            f"balance: the weight of sample {at} is {array[at]}; a weight is finite and at least 0."
        )
    if not array.any():
        raise DataError("balance: all weights are 0.")
    return array
