"""Which samples are trained on, and which are held out: functions of a seed and the samples' numbers and labels.

A sample's draw is a hash of (seed, number), so that the choice depends on neither ranks, workers, batch size nor the
order in which anything is read. Where the labels are class indices, each class gets its share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..common.errors import DataError
from ..common.storage.addresses import stamp
from ..common.storage.shared import Arrays, key_of, shared_arrays
from .order.batches import Rest, Samples, as_array, taken
from .order.epoch import line_of
from .order.permutation import splitmix
from .sample_options import SampleOptions

if TYPE_CHECKING:
    from .beton.data_set import BetonFiles

Indices = NDArray[np.int64]
_AT_ONCE = 1 << 18  # samples drawn at a time
_FORMAT = 2  # of a selection that is kept; another one if the same options select other samples
# Of n draws, so many that more than `quota` are almost always among them; more than `_MOST` of all: all.
_MARGIN, _MOST = 8, 0.9


def frequencies(
    indices: Indices,
    parts: Sequence[Samples],
    shares: Sequence[float],
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return how often each of `indices` is trained on, relative to the others: by `weights`, or by the shares of the
    `parts` that they are divided into; without both, equally often."""
    if weights is not None:
        return weights
    often = np.ones(len(indices))
    for part, share in zip(parts, shares, strict=True):
        often[np.isin(indices, as_array(part))] = share / max(len(part), 1)
    return often


def used_samples(indices: Any, samples: int) -> Samples:
    """Return the indices to load, None: all; without an array where none was given."""
    if isinstance(indices, range) and indices.step == 1 and 0 <= indices.start < indices.stop <= samples:
        return indices
    if isinstance(indices, Rest) and indices.samples == samples:
        return indices
    return range(samples) if indices is None else check_indices(indices, samples)


def check_indices(indices: Any, samples: int) -> NDArray[np.int64]:
    """Return the indices to load; for a boolean mask `(samples,)`, those that are True."""
    chosen = np.asarray(indices)
    if chosen.dtype == np.bool_ and chosen.shape == (samples,):
        chosen = np.flatnonzero(chosen)
    if chosen.ndim != 1 or len(chosen) == 0 or not np.issubdtype(chosen.dtype, np.integer):
        raise DataError(f"indices must be a non-empty list of sample indices, not {indices!r:.80}.")
    if chosen.min() < 0 or chosen.max() >= samples:  # masks of all would take memory that grows with the data
        wrong = chosen[(chosen < 0) | (chosen >= samples)][0]
        raise DataError(f"indices contains {wrong}, but the data set has samples 0 to {samples - 1}.")
    # A copy, which the caller cannot change; but of what is mapped (`shared_arrays`), which nobody can.
    return chosen.astype(np.int64, copy=chosen.flags.writeable or not isinstance(chosen.base, np.memmap))


@dataclass(frozen=True, eq=False)
class Selection:
    """Which samples of a data set are trained on, in which shares, and which are evaluated."""

    train: Samples
    val: Indices | None = None  # held out; None: none
    parts: tuple[Indices, ...] = ()  # of `train`, each with the same share of an epoch
    weights: NDArray[np.float64] | None = None  # of `train`
    line: Indices | None = None  # of the weights or, in quasi-random order, the parts: see `order.epoch.line_of`

    def arrays(self) -> Arrays:
        """Return what `of` makes it from."""
        found: dict[str, NDArray[Any] | None] = {"val": self.val, "weights": self.weights, "line": self.line}
        if isinstance(self.train, Rest):
            found |= {"left_out": self.train.left_out, "before": self.train.before}
        elif isinstance(self.train, np.ndarray):
            found["train"] = self.train
        if self.parts:
            found |= {"parts": np.concatenate(self.parts), "ends": np.cumsum([len(part) for part in self.parts])}
        return {name: array for name, array in found.items() if array is not None}

    @classmethod
    def of(cls, arrays: Arrays, samples: int) -> Self:
        train: Samples = arrays.get("train", range(samples))
        if "left_out" in arrays:
            train = Rest(samples, arrays["left_out"], arrays["before"])
        parts = np.split(arrays["parts"], arrays["ends"][:-1]) if "parts" in arrays else ()
        return cls(train, arrays.get("val"), tuple(parts), arrays.get("weights"), arrays.get("line"))


def select(
    options: SampleOptions, samples: int, labels: Callable[[], NDArray[Any] | None], *, near: bool = False
) -> Selection:
    """Return which of the data set's samples to use. `labels()` returns those of all, None if they are masks. `near`:
    for an order that reads the file in runs.

    Raises:
        DataError: if there are none to train on or to evaluate, an index is out of range or there twice, or the
            labels are not what an option needs.
    """
    used: Samples = range(samples) if options.indices is None else _used(options.indices, samples)
    needed = options.splits or options.per_class or options.limit or options.balance == "class"
    known = labels() if needed else None
    train, val = used, None
    if options.val_split is not None:
        out = held_out(used, classes_of(known, used), options.val_split, options.split_seed)
        val = taken(used, out)
        train = Rest(samples, out) if isinstance(used, range) else np.delete(as_array(used), out)
    elif options.folds is not None:
        used = as_array(used)
        fold = folds_of(used, classes_of(known, used), options.folds, options.split_seed)
        train, val = used[fold != options.fold], used[fold == options.fold]
        if len(val) == 0:
            raise DataError(f"fold={options.fold} of folds={options.folds} is empty: each class has too few samples.")
    if options.per_class is not None:
        train = few(train, classes_of(known, train), options.per_class, options.split_seed)
    if options.limit is not None:
        train = limited(train, classes_of(known, train), options.limit, options.split_seed)
    if options.balance is None:
        return Selection(train, val)
    if options.balance == "class":
        classes = classes_of(known, train)
        if classes is None:
            raise DataError(
                'balance="class" needs labels that are class indices, but these are not. Pass one weight per sample.'
            )
        line = _line(train, classes) if near else None
        return Selection(train, val, parts=tuple(by_class(train, classes)), line=line)
    weights = check_weights(_values("balance", options.balance), samples)[as_array(train)]
    if not weights.any():
        raise DataError("balance: the weights of all samples that are trained on are 0.")
    line = line_of(_in_place(train, weights) if near else weights, near=near)
    return Selection(train, val, weights=weights, line=line)


def _in_place(samples: Samples, values: NDArray[Any]) -> NDArray[Any]:
    """Return values of the samples, both `(n,)`, in the order of the samples in the file."""
    return values[np.argsort(samples, kind="stable")] if isinstance(samples, np.ndarray) else values


def _line(samples: Samples, classes: NDArray[np.integer[Any]]) -> Indices:
    """Return the line of samples whose classes `(n,)` have equal shares."""
    _, inverse, counts = np.unique(_in_place(samples, classes), return_inverse=True, return_counts=True)
    return line_of((1 / counts)[inverse], near=True)


def _used(indices: Any, samples: int) -> Indices:
    values = np.asarray(_values("indices", indices))
    if values.dtype.kind not in "biu" or values.ndim != 1:
        raise DataError(
            f"indices has values of type {values.dtype} and shape {values.shape}. Pass integers, or true and "
            "false, in one dimension."
        )
    if values.dtype == np.bool_:
        if values.shape != (samples,):
            raise DataError(
                f"indices is a mask of {values.size} samples, but the data set has {samples}. Pass one true or "
                "false for each."
            )
        values = np.flatnonzero(values)
    if len(values) == 0:
        raise DataError("indices selects no sample.")
    values = check_indices(values, samples)
    sorted_values = np.sort(values)
    again = sorted_values[1:][sorted_values[1:] == sorted_values[:-1]]
    if len(again):
        raise DataError(
            f"indices contains {again[0]} more than once. Leave the repetition out; to train on some samples more "
            "often than on others, use balance=."
        )
    return values


def selected(options: SampleOptions, beton: BetonFiles, *, near: bool = False) -> Selection:
    """Return which of the samples the options select. Of a large data set, one process of this machine computes it, and
    all of its processes map the arrays.

    Raises:
        DataError: as `select`.
    """
    samples = len(beton)

    def make() -> Selection:
        return select(options, samples, beton.compact_labels, near=near)

    if not options.selects or not beton.shareable:
        return make()
    return Selection.of(once(options, beton, f"selection, {near=}", lambda: make().arrays()), samples)


def once(options: SampleOptions, beton: BetonFiles, what: str, make: Callable[[], Arrays]) -> Arrays:
    """Return arrays that follow from the samples which the options select. Those of a large data set are computed by
    one process of this machine, and mapped by all of its processes.

    Args:
        options: what selects the samples.
        beton: the data set.
        what: a name of the arrays, and all else that they depend on.
        make: computes them.
    """
    if not beton.shareable:
        return make()
    data = [len(beton), beton.checksum, beton.label_name, beton.parts]
    return shared_arrays(key_of(what, _FORMAT, *data, *map(_fact, _values_of(options))), make)


def _values_of(options: SampleOptions) -> list[Any]:
    return [getattr(options, field.name) for field in fields(SampleOptions)]


def _fact(value: Any) -> Any:
    """Return what changes with the value of an option, for JSON: of a file its size and time of change. No server is
    asked for an address, which `_values` refuses."""
    if isinstance(value, str | Path) and value != "class":
        return [str(Path(value).absolute()), *stamp(Path(value))]
    return hashlib.sha256(np.asarray(value).tobytes()).hexdigest() if isinstance(value, tuple) else value


_READERS: dict[str, Callable[[Path], Any]] = {
    ".npy": lambda path: np.load(path, allow_pickle=False),
    ".json": lambda path: json.loads(path.read_text()),
    ".txt": lambda path: [json.loads(line) for line in path.read_text().split()],
}


def _values(name: str, given: Any) -> Any:
    """Return the values of an option, from its file if it is a path."""
    if not isinstance(given, str | Path):
        return given
    path = Path(given)
    if path.suffix not in _READERS:
        raise DataError(f"{name}={str(given)!r} must be a file that ends in {', '.join(_READERS)}.")
    try:
        values = _READERS[path.suffix](path)
    except OSError as error:
        raise DataError(f"{name}={str(given)!r} cannot be read: {error.strerror or error}.") from None
    except Exception as error:  # damaged files make numpy's reader raise many types
        raise DataError(f"{name}={str(given)!r} does not contain a list of numbers: {error}.") from None
    try:
        return np.asarray(values)
    except ValueError:
        raise DataError(f"{name}={str(given)!r} does not contain a list of numbers.") from None


def draws(samples: Indices, seed: int) -> NDArray[np.uint64]:
    """Return a pseudo-random number for each sample `(n,)`, of the seed and its number."""
    return splitmix(splitmix(np.array([seed], np.uint64)) ^ splitmix(samples.astype(np.uint64)))


def classes_of(labels: NDArray[Any] | None, samples: Samples) -> NDArray[np.integer[Any]] | None:
    """Return the class of each sample `(n,)`; None if the labels `(N,)` are not class indices: of masks (None),
    vectors and floats."""
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu":
        return None
    if isinstance(samples, Rest):
        return np.delete(labels, samples.left_out)
    return labels[samples.start : samples.stop] if isinstance(samples, range) else labels[as_array(samples)]


def held_out(samples: Samples, classes: NDArray[np.integer[Any]] | None, share: float, seed: int) -> Indices:
    """Return the places in `samples` `(n,)` of those to hold out, sorted: `share` of them, rounded to a sample, and of
    each class.

    The shares of the classes are rounded by the largest remainders; each keeps a sample to train on.

    Raises:
        DataError: if no sample would be held out, or none trained on.
    """
    wanted = round(len(samples) * share)
    names, counts = _counted(samples, classes)
    exact = counts * share
    quota = np.minimum(np.floor(exact).astype(np.int64), counts - 1)
    # The largest remainder first; inf: not one more.
    room = np.where((quota < counts - 1) & (quota < exact), quota - exact, np.inf)
    for at in np.argsort(room, kind="stable")[: max(wanted - int(quota.sum()), 0)]:
        quota[at] += np.isfinite(room[at])
    if not quota.any():
        raise DataError(
            f"val_split={share:g} holds out none of {len(samples)} samples: each class keeps one to train on. Raise "
            "it, or pass val=."
        )
    return _first_of_each(samples, classes, names, counts, quota, seed).places


def folds_of(samples: Indices, classes: NDArray[np.integer[Any]] | None, folds: int, seed: int) -> Indices:
    """Return the fold of each sample, `(n,)` from 0: equally many in each, and of each class, up to one sample.

    A class's only sample is in none (-1), and so always trained on.

    Raises:
        DataError: if there are more folds than samples.
    """
    if folds > len(samples):
        raise DataError(f"folds={folds} is more than the {len(samples)} samples. Use fewer folds.")
    groups = np.zeros(len(samples), np.uint8) if classes is None else classes
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    alone = counts[inverse] == 1 if classes is not None else np.zeros(len(samples), np.bool_)
    order = np.lexsort((draws(samples, seed), groups, alone))
    fold = np.empty(len(samples), np.int64)
    fold[order] = np.arange(len(samples)) % folds  # classes one after the other: the next one goes on
    fold[alone] = -1
    return fold


def few(samples: Samples, classes: NDArray[np.integer[Any]] | None, per_class: int, seed: int) -> Indices:
    """Return `per_class` samples of each class, in order.

    Raises:
        DataError: if the labels are not class indices, or a class has fewer.
    """
    if classes is None:
        raise DataError(
            f"per_class={per_class} needs labels that are class indices, but these are not. Use limit= instead."
        )
    names, counts = _counted(samples, classes)
    if counts.min() < per_class:
        at = int(np.argmin(counts))
        raise DataError(
            f"per_class={per_class}: class {names[at]} has only {counts[at]} samples to train on. Set it to at most "
            f"{counts[at]}."
        )
    quota = np.full_like(counts, per_class)
    return taken(samples, _first_of_each(samples, classes, names, counts, quota, seed).places)


def limited(samples: Samples, classes: NDArray[np.integer[Any]] | None, limit: int, seed: int) -> Samples:
    """Return at most `limit` samples, in order: of each class its share, up to one sample."""
    if limit >= len(samples):
        return samples
    # The k-th of n samples of a class is at (k + 1/2) / n on a line that is the same for all classes: its first part
    # has of each class its share. It ends before (limit + classes / 2) / samples.
    names, counts = _counted(samples, classes)
    most = counts * ((limit + len(counts) / 2) / len(samples)) + 0.5
    quota = np.minimum(most.astype(np.int64) + 1, counts)
    first = _first_of_each(samples, classes, names, counts, quota, seed)
    line = (first.ranks + 0.5) / counts[first.groups]
    return np.sort(taken(samples, first.places[np.lexsort((first.random, line))[:limit]]))


def _counted(samples: Samples, classes: NDArray[np.integer[Any]] | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the classes, sorted, and how many samples each has; without classes, one of all."""
    if classes is None:
        return np.zeros(1, np.int64), np.array([len(samples)])
    return np.unique(classes, return_counts=True)


class _First(NamedTuple):
    """Samples, each `(m,)`: their places in the given ones, sorted; the numbers of their classes, their draws, and
    their ranks by these in their classes, from 0."""

    places: Indices
    groups: Indices
    random: NDArray[np.uint64]
    ranks: Indices


def _first_of_each(
    samples: Samples, classes: NDArray[np.integer[Any]] | None, names: NDArray[Any], counts: NDArray[np.int64],
    quota: NDArray[np.int64], seed: int,
) -> _First:  # fmt: skip
    """Return the first `quota` samples of each class by their draws: those whose draws are below a bound, so that few
    are sorted; all, in the rare case that these are too few of a class."""
    below = np.full(len(quota), np.iinfo(np.uint64).max)
    likely = (quota + _MARGIN * (np.sqrt(quota) + 1)) / counts
    below[likely < _MOST] = (likely[likely < _MOST] * 2.0**64).astype(np.uint64)
    for bounds in (below, np.full_like(below, np.iinfo(np.uint64).max)):
        found = [
            _drawn(samples, classes, names, bounds, seed, range(start, min(start + _AT_ONCE, len(samples))))
            for start in range(0, len(samples), _AT_ONCE)
        ]
        places, groups, random = (np.concatenate(column) for column in zip(*found, strict=True))
        if (np.bincount(groups, minlength=len(quota)) >= quota).all():
            break
    ranks = _ranks(groups, random)
    chosen = ranks < quota[groups]
    return _First(places[chosen], groups[chosen], random[chosen], ranks[chosen])


def _drawn(
    samples: Samples, classes: NDArray[np.integer[Any]] | None, names: NDArray[Any], below: NDArray[np.uint64],
    seed: int, part: range,
) -> tuple[Indices, Indices, NDArray[np.uint64]]:  # fmt: skip
    """Return the places, the numbers of the classes and the draws of a part of the samples, of those whose draws are up
    to the bound of their class."""
    places = as_array(part)
    random = draws(taken(samples, places), seed)
    own = np.zeros(len(part), np.int64) if classes is None else classes[part.start : part.stop]
    groups = np.searchsorted(names, own)
    few = random <= below[groups]
    return places[few], groups[few], random[few]


def _ranks(groups: NDArray[np.int64], random: NDArray[np.uint64]) -> Indices:
    """Return the rank of each sample among those of its group, by its draw, from 0."""
    order = np.lexsort((random, groups))
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order[0]] - 1))
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(starts, np.diff([*starts, len(groups)]))
    return ranks


def by_class(samples: Samples, classes: NDArray[np.integer[Any]]) -> list[Indices]:
    """Return the samples of each class, which `order.epoch.mixed` gives equal shares."""
    order = np.argsort(classes, kind="stable")
    return np.split(taken(samples, order), np.flatnonzero(np.diff(classes[order])) + 1)


def check_weights(weights: Sequence[float] | NDArray[Any], samples: int) -> NDArray[np.float64]:
    """Return weights of all samples as an array `(N,)`.

    Raises:
        DataError: if there are more or fewer, or one is negative or not finite, or all are 0.
    """
    array = np.asarray(weights)
    if array.dtype.kind not in "biuf":
        raise DataError(f"balance has values of type {array.dtype}. Pass numbers, one weight per sample.")
    if array.ndim != 1:
        raise DataError(f"balance has values of shape {array.shape}. Pass one weight per sample, in one dimension.")
    array = array.astype(np.float64)
    if array.shape != (samples,):
        raise DataError(f"balance has {array.size} weights, but the data set has {samples} samples.")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise DataError(f"balance: the weight of sample {at} is {array[at]}; a weight is finite and at least 0.")
    if not array.any():
        raise DataError("balance: all weights are 0.")
    return array
