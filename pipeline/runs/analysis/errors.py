"""What a model gets wrong, as values: one class per kind of targets. Computed from one pass over the data; see `judge`.

Intervals of shares are Wilson's (1927, "Probable inference, the law of succession, and statistical inference"), at
95 %: they stay within 0 and 1, and are right for few samples.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ....common.pictures import displayed, save_result
from ....common.table import Table

Z = 1.959963984540054  # two-sided, 95 %
BINS = 15
"""Bins of the calibration, as in Guo et al. (2017, "On calibration of modern neural networks")."""
SHOWN = 20
"""Rows of a printed table; those with the lowest scores, if there are more."""


def wilson(successes: float, total: float) -> tuple[float, float]:
    """Return the interval of a share; (0, 1) of nothing."""
    if not total:
        return 0.0, 1.0
    share, square = successes / total, Z * Z / total
    middle, half = share + square / 2, Z * math.sqrt(share * (1 - share) / total + square / total / 4)
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return max(min(low, share), 0.0), min(max(high, share), 1.0)  # of all or none, rounding would exclude the share


@dataclass(frozen=True, eq=False)
class Errors:
    """The judged samples of a data set, in its order.

    Attributes:
        source: the data, as `load` takes it.
        metrics: `val_loss` and the task's metrics of the same pass.
        classes: names of the classes or labels; their numbers if the data has none.
        samples: `(N,)` int64, the index of each sample in the data.
        losses: `(N,)` float32, the task's loss of each sample alone.
        pictures: of the worst and the least certain samples, by sample: `image` `(H, W, 3)` uint8, as the model saw
            it; of masks also `truth` and `prediction`, `(H, W)`.
        colors: of the classes of masks, `"#rrggbb"`, as the data has them, or ""; see `convert`.

    Example::

        >>> errors = result.errors("val.beton")
        >>> len(errors) == len(errors.losses)
        True
    """

    source: str
    metrics: Mapping[str, float]
    classes: tuple[str, ...]
    samples: NDArray[np.int64]
    losses: NDArray[np.float32]
    pictures: Mapping[int, Mapping[str, NDArray[Any]]] = field(kw_only=True, repr=False)
    colors: tuple[str, ...] = field(kw_only=True, default=(), repr=False)

    heads: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str] = ""  # of the picture

    def __len__(self) -> int:
        return len(self.samples)

    def worst(self, count: int = 24) -> NDArray[np.int64]:
        """Return the places of the samples with the highest losses, `(n,)`; `samples` has their indices."""
        finite = np.where(np.isfinite(self.losses), self.losses, np.inf)
        return np.argsort(-finite, kind="stable")[:count]

    def least_certain(self, count: int = 24) -> NDArray[np.int64]:  # noqa: ARG002
        """Return the places of the samples whose predictions are least certain; none without probabilities."""
        return np.empty(0, np.int64)

    def truth(self, place: int) -> str:  # noqa: ARG002
        """Return the target of a sample in words."""
        return ""

    def prediction(self, place: int) -> str:  # noqa: ARG002
        """Return the prediction for a sample in words."""
        return ""

    def rows(self) -> Sequence[tuple[str, ...]]:
        """Return the table's rows, as text: one per class, label or value."""
        return []

    def scores(self) -> NDArray[np.float64]:
        """Return a number per row, by which a table that is too long is cut: the lowest stay."""
        return np.zeros(len(self.rows()))

    def table(self, most: int | None = SHOWN) -> Table:
        """Return the table; of more than `most` rows those with the lowest scores. None: all."""
        rows = self.rows()
        chosen = range(len(rows))
        caption = ""
        if most is not None and len(rows) > most:
            chosen = sorted(np.argsort(self.scores(), kind="stable")[:most].tolist())  # type: ignore[assignment]
            caption = f"The {most} lowest of {len(rows)}."
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return Table(
            self.heads, [rows[at] for at in chosen], f"{self.source}: {len(self):,} samples; {figures}", caption,
            figures=True,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the table and the worst samples as JSON values; an interval is named by its figure, too."""
        pairs = zip(("", *self.heads), self.heads, strict=False)
        names = [f"{before} {head}" if self.heads.count(head) > 1 else head for before, head in pairs]
        return {
            "source": self.source,
            "samples": len(self),
            "metrics": dict(self.metrics),
            "table": [dict(zip(names, row, strict=True)) for row in self.rows()],
            "worst": [self.of(int(place)) for place in self.worst()],
            "least certain": [self.of(int(place)) for place in self.least_certain()],
        }

    def of(self, place: int) -> dict[str, Any]:
        """Return what is known of one sample, as JSON values."""
        about = {"truth": self.truth(place), "prediction": self.prediction(place)}
        return {
            "sample": int(self.samples[place]),
            "loss": float(self.losses[place]),
            **{name: text for name, text in about.items() if text},
        }

    def save(self, path: str | Path) -> Path:
        """Write the table and the worst samples as `.json`, or a picture as `.png`, `.svg` or `.pdf`.

        Raises:
            DataError: for another suffix.
            MissingExtra: for a picture, without matplotlib.
        """
        save_result(self, path, dpi=110)
        return Path(path)

    def show(self) -> Any:
        """Return the picture, which a notebook displays: a matplotlib figure."""
        from .picture import figure_of

        return displayed(figure_of(self))

    def __str__(self) -> str:
        return str(self.table()) if self.heads else f"{self.source}: {len(self):,} samples, {dict(self.metrics)}"

    def _repr_html_(self) -> str:
        from .picture import thumbnails

        return (self.table().html() if self.heads else f"<pre>{html.escape(str(self))}</pre>") + thumbnails(self)


def pooled(parts: Sequence[Errors]) -> Errors:
    """Return the errors of several parts of one data set, such as the folds of a cross-validation, as one: the values
    of each sample in the data's order. `metrics` are the means over the parts that have them, weighted by their
    samples."""
    first = parts[0]
    order = np.argsort(np.concatenate([each.samples for each in parts]), kind="stable")
    changed: dict[str, Any] = {}
    for name in (each.name for each in dataclasses.fields(first)):
        values = [getattr(each, name) for each in parts]
        if isinstance(values[0], np.ndarray):
            of_samples = all(len(value) == len(each) for value, each in zip(values, parts, strict=True))
            changed[name] = np.concatenate(values)[order] if of_samples and name != "confusion" else sum(values)
    kept = {sample: each for part in parts for sample, each in part.pictures.items()}
    metrics = dict[str, float]()
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        having = [part for part in parts if name in part.metrics]  # not where it is undefined
        total = sum(map(len, having))
        metrics[name] = float(sum(part.metrics[name] * len(part) for part in having) / total)
    return dataclasses.replace(first, metrics=metrics, pictures=kept, **changed)


@dataclass(frozen=True, eq=False)
class ClassErrors(Errors):
    """Errors of `Classification`.

    Attributes:
        targets, predictions: `(N,)` int64, class indices.
        probabilities: `(N,)` float32, of the predicted class.
    """

    targets: NDArray[np.int64] = field(kw_only=True)
    predictions: NDArray[np.int64] = field(kw_only=True)
    probabilities: NDArray[np.float32] = field(kw_only=True)

    kind: ClassVar[str] = "classes"
    heads: ClassVar[tuple[str, ...]] = (
        "class", "samples", "precision", "95 %", "recall", "95 %", "F1", "mistaken for",
    )  # fmt: skip

    @cached_property
    def confusion(self) -> NDArray[np.int64]:
        """How many samples of each class were predicted as each, `(K, K)`: truth × prediction."""
        # Of ten thousand classes most of the pages are never touched, and so take no memory.
        found = np.zeros((len(self.classes), len(self.classes)), np.int64)
        np.add.at(found, (self.targets, self.predictions), 1)
        return found

    def confusion_of(self, classes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows and columns of some classes `(k,)` of `confusion`, `(k, k)`, without all others."""
        place, count = np.full(len(self.classes), -1), len(classes)
        place[classes] = np.arange(count)
        truth, said = place[self.targets], place[self.predictions]
        there = (truth >= 0) & (said >= 0)
        return np.bincount(truth[there] * count + said[there], minlength=count**2).reshape(count, count)

    @cached_property
    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The samples of each class, those predicted as it, and those rightly."""
        classes = len(self.classes)
        right = self.targets == self.predictions
        return (
            np.bincount(self.targets, minlength=classes),
            np.bincount(self.predictions, minlength=classes),
            np.bincount(self.targets[right], minlength=classes),
        )

    def most_confused(self, count: int = 10) -> list[tuple[str, str, int]]:
        """Return the pairs of classes that are taken for each other most often: truth, prediction, samples."""
        wrong = self.targets != self.predictions
        pairs = self.targets[wrong] * len(self.classes) + self.predictions[wrong]
        kinds, counts = np.unique(pairs, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:count]
        names, classes = self.classes, len(self.classes)
        return [
            (names[k // classes], names[k % classes], int(n)) for k, n in zip(kinds[order], counts[order], strict=True)
        ]

    def rows(self) -> Sequence[tuple[str, ...]]:
        mistaken: dict[str, str] = {}
        for truth, prediction, count in self.most_confused(len(self)):
            mistaken.setdefault(truth, f"{prediction} {count}")
        return [
            (
                name, f"{there}", *_share(right, said), *_share(right, there), f"{score:.3f}" if there + said else "–",
                mistaken.get(name, ""),
            )
            for name, there, said, right, score in zip(self.classes, *self._counts, self.scores(), strict=True)
        ]  # fmt: skip

    def scores(self) -> NDArray[np.float64]:
        """Return the F1 of each class; 1 of a class that is neither there nor predicted."""
        there, said, right = self._counts
        return np.where(there + said > 0, 2 * right / np.maximum(there + said, 1), 1.0)

    def least_certain(self, count: int = 24) -> NDArray[np.int64]:
        return np.argsort(self.probabilities, kind="stable")[:count]

    @cached_property
    def calibration(self) -> Calibration:
        """How often predictions of a probability are right."""
        return Calibration.of(self.probabilities, self.targets == self.predictions)

    def truth(self, place: int) -> str:
        return self.classes[int(self.targets[place])]

    def prediction(self, place: int) -> str:
        return f"{self.classes[self.predictions[place]]} {self.probabilities[place]:.0%}"


@dataclass(frozen=True)
class Calibration:
    """Probabilities against what happened, in `BINS` bins of equal width.

    Attributes:
        probability: the mean in each bin, `(bins,)`; NaN without samples.
        right: the share of right predictions in each.
        samples: in each.
    """

    probability: NDArray[np.float64]
    right: NDArray[np.float64]
    samples: NDArray[np.int64]

    @classmethod
    def of(cls, probabilities: NDArray[Any], right: NDArray[np.bool_]) -> Calibration:
        """Return that of predictions `(n,)`."""
        bins = np.clip((probabilities * BINS).astype(np.int64), 0, BINS - 1)
        counts = np.bincount(bins, minlength=BINS)
        with np.errstate(invalid="ignore"):
            means = np.bincount(bins, probabilities, BINS) / counts
            shares = np.bincount(bins, right, BINS) / counts
        return cls(means, shares, counts)

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance between the two, weighted by samples, 0 to 1."""
        distance = np.abs(np.nan_to_num(self.probability - self.right))
        return float((distance * self.samples).sum() / max(self.samples.sum(), 1))


@dataclass(frozen=True, eq=False)
class LabelErrors(Errors):
    """Errors of `MultiLabel`.

    Attributes:
        targets: `(N, K)` bool.
        probabilities: `(N, K)` float32.
    """

    targets: NDArray[np.bool_] = field(kw_only=True)
    probabilities: NDArray[np.float32] = field(kw_only=True)

    kind: ClassVar[str] = "labels"
    heads: ClassVar[tuple[str, ...]] = ("label", "samples", "precision", "95 %", "recall", "95 %", "F1", "AP")

    def curve(self, label: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float32]]:
        """Return precision, recall and threshold, each `(n,)`, of a label, from the highest threshold on."""
        order = np.argsort(-self.probabilities[:, label], kind="stable")
        right, thresholds = self.targets[order, label], self.probabilities[order, label]
        last = np.append(np.diff(thresholds) != 0, True)  # equal probabilities are one threshold
        found = np.cumsum(right)[last]
        return found / (np.flatnonzero(last) + 1), found / max(right.sum(), 1), thresholds[last]

    def average_precision(self, label: int) -> float:
        """Return the area under the curve of precision and recall, as a sum of steps; NaN without positive samples."""
        if not self.targets[:, label].any():
            return math.nan
        precision, recall, _ = self.curve(label)
        return float((np.diff(recall, prepend=0) * precision).sum())

    def rows(self) -> Sequence[tuple[str, ...]]:
        said = self.probabilities >= 0.5
        right, there = (said & self.targets).sum(0), self.targets.sum(0)
        found = []
        for label, name in enumerate(self.classes):
            counts = said[:, label].sum(), there[label]
            f1 = f"{2 * right[label] / sum(counts):.3f}" if any(counts) else "–"
            shares = (text for count in counts for text in _share(right[label], count))
            found.append((name, f"{there[label]}", *shares, f1, f"{self.average_precision(label):.3f}"))
        return found

    def scores(self) -> NDArray[np.float64]:
        found = np.array([*map(self.average_precision, range(len(self.classes)))])
        return np.where(np.isnan(found), 1.0, found)

    def least_certain(self, count: int = 24) -> NDArray[np.int64]:
        return np.argsort(np.abs(self.probabilities - 0.5).min(1), kind="stable")[:count]

    def truth(self, place: int) -> str:
        return self._names(self.targets[place])

    def prediction(self, place: int) -> str:
        return self._names(self.probabilities[place] >= 0.5)

    def _names(self, chosen: NDArray[np.bool_]) -> str:
        return ", ".join(self.classes[at] for at in np.flatnonzero(chosen)) or "none"


@dataclass(frozen=True, eq=False)
class ValueErrors(Errors):
    """Errors of `Regression`.

    Attributes:
        targets, values: `(N, K)` float64: what the numbers are, and what was predicted.
    """

    targets: NDArray[np.float64] = field(kw_only=True)
    values: NDArray[np.float64] = field(kw_only=True)

    kind: ClassVar[str] = "values"
    heads: ClassVar[tuple[str, ...]] = ("value", "mean", "spread", "mean error", "abs. error", "95 % below", "r²")

    @property
    def residuals(self) -> NDArray[np.float64]:
        """Prediction minus target, `(N, K)`."""
        return self.values - self.targets

    def rows(self) -> Sequence[tuple[str, ...]]:
        found = []
        for k, (name, score) in enumerate(zip(self.classes, self.scores(), strict=True)):
            off, target = self.residuals[:, k], self.targets[:, k]
            size = np.abs(off)
            figures = target.mean(), target.std(), off.mean(), size.mean(), np.quantile(size, 0.95)
            found.append((name, *(f"{figure:.4g}" for figure in figures), f"{score:.3f}"))
        return found

    def scores(self) -> NDArray[np.float64]:
        """Return r² of each value; NaN where all targets are equal."""
        spread = ((self.targets - self.targets.mean(0)) ** 2).sum(0)
        return np.asarray(1 - (self.residuals**2).sum(0) / np.where(spread > 0, spread, np.nan))

    def truth(self, place: int) -> str:
        return ", ".join(f"{each:.4g}" for each in self.targets[place])

    def prediction(self, place: int) -> str:
        return ", ".join(f"{each:.4g}" for each in self.values[place])


@dataclass(frozen=True, eq=False)
class PixelErrors(Errors):
    """Errors of `Segmentation`.

    Attributes:
        confusion: `(K, K)` int64, pixels by truth × prediction, without those that do not count.
        right, counted: `(N,)` int64, of each image: pixels that are right, and all that count.
    """

    confusion: NDArray[np.int64] = field(kw_only=True)
    right: NDArray[np.int64] = field(kw_only=True)
    counted: NDArray[np.int64] = field(kw_only=True)

    kind: ClassVar[str] = "pixels"
    heads: ClassVar[tuple[str, ...]] = ("class", "pixels", "precision", "recall", "IoU", "mistaken for")

    def rows(self) -> Sequence[tuple[str, ...]]:
        wrong, found = self.confusion.copy(), []
        np.fill_diagonal(wrong, 0)
        total = self.confusion.sum()
        for k, (name, score) in enumerate(zip(self.classes, self.scores(), strict=True)):
            there, said, right = self.confusion[k].sum(), self.confusion[:, k].sum(), self.confusion[k, k]
            other = int(wrong[k].argmax())
            mistaken = f"{self.classes[other]} {wrong[k, other] / there:.1%}" if wrong[k].any() else ""
            share = f"{there / max(total, 1):.1%}"
            found.append((name, share, _share(right, said)[0], _share(right, there)[0], f"{score:.3f}", mistaken))
        return found

    def scores(self) -> NDArray[np.float64]:
        """Return the intersection over union of each class; NaN of a class that is neither there nor predicted."""
        right = np.diag(self.confusion)
        union = self.confusion.sum(0) + self.confusion.sum(1) - right
        return np.where(union > 0, right / np.maximum(union, 1), np.nan)

    def prediction(self, place: int) -> str:
        return f"{self.right[place] / max(self.counted[place], 1):.0%} of its pixels are right"


def _share(successes: float, total: float) -> tuple[str, str]:
    if not total:
        return "–", ""
    low, high = wilson(successes, total)
    return f"{successes / total:.1%}", f"{low:.0%} to {high:.0%}"
