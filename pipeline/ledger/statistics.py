"""Speeds with quartiles, ratios with confidence intervals, and tests that may end after any of several looks."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean, stdev
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

K = TypeVar("K", bound=Hashable)

LEVEL = 0.95
TRIM = 0.2  # of the rounds, at each end: one of five; the usual choice
MOST = 700.0  # approximately the logarithm of the largest float
RESOLVED = 1.0
"""A ratio whose interval extends beyond ± 100 % (a factor of two to each side) is not displayed as a number."""
UNRESOLVED = "not resolved"


@dataclass(frozen=True)
class Figure:
    """A measured quantity: its typical `value` over `n` rounds, and their quartiles, which include it."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Ratio(Figure):
    """A ratio from `n` rounds, taken within each round, and its confidence interval, `low` to `high`."""

    @property
    def spread(self) -> float:
        """Half the interval's width relative to the value: 0.02 for ± 2 %."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf

    @property
    def resolved(self) -> bool:
        """Whether the interval is narrow enough for a meaningful value: a factor of two to each side."""
        return self.spread <= RESOLVED

    @property
    def text(self) -> str:
        return f"{self.value:.2f}  ({self.low:.2f} to {self.high:.2f})" if self.resolved else UNRESOLVED

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Levels(Generic[K]):
    """The typical speeds of all variants on one scale. The logarithm of a trial's speed is the sum of its variant's
    level, the round's effect (the machine's drift) and noise; a level is the trimmed mean of the trials without the
    rounds' effects. So the faster of two variants always has a ratio above 1, and gains multiply, which separate
    medians could contradict. With up to four rounds nothing is trimmed, and all values are geometric means."""

    def __init__(self, rounds: Sequence[Mapping[K, float]]) -> None:
        names = list(rounds[0])
        logs = np.log(np.array([[speeds[name] for name in names] for speeds in rounds], np.float64))
        drift = np.zeros(len(rounds))
        for _ in range(3):  # Tukey's median polish: one outlier shifts neither its round nor its variant
            centers = np.median(logs - drift[:, None], axis=0)
            drift = np.median(logs - centers, axis=1)
        still = (logs - drift[:, None]).T
        middle = _trimmed(drift).mean
        self._speeds = {name: [speeds[name] for speeds in rounds] for name in names}
        self._logs = dict(zip(names, logs.T, strict=True))
        self._levels = {name: _trimmed(trials).mean + middle for name, trials in zip(names, still, strict=True)}

    def speed(self, name: K) -> Figure:
        value, speeds = math.exp(self._levels[name]), self._speeds[name]
        low, high = np.percentile(speeds, [25, 75]).tolist()
        return Figure(value, min(low, value), max(high, value), len(speeds))

    def ratio(self, over: K, under: K, level: float = LEVEL) -> Ratio:
        return self.product({over: 1, under: -1} if over != under else {}, level)

    def product(self, powers: Mapping[K, int], level: float = LEVEL) -> Ratio:
        """Return the product of the levels, each to its power; these sum to 0, so that the drift cancels."""
        rounds = len(next(iter(self._logs.values())))
        if not any(powers.values()):
            return Ratio(1.0, 1.0, 1.0, rounds)
        within = sum(power * self._logs[name] for name, power in powers.items())
        value = sum(power * self._levels[name] for name, power in powers.items())
        return _interval(value, _half(_trimmed(np.asarray(within)), level), rounds)


def ratio(ratios: Sequence[float], level: float = LEVEL, trim: float = TRIM) -> Ratio:
    """Return a ratio from one value per round: Student's t of the trimmed mean of the logarithms (Tukey and McLaughlin
    1963; Yuen 1974), which treat it and its inverse alike. Rounds in which the machine was busy are trimmed."""
    one = _trimmed(np.log(np.asarray(ratios, np.float64)), trim)
    return _interval(one.mean, _half(one, level), len(ratios))


def ratio_of_means(over: Sequence[float], under: Sequence[float], level: float = LEVEL) -> Ratio:
    """Return the ratio of quantities of separate rounds: as `ratio`, with Welch's degrees of freedom, rounded down."""
    one, two = (_trimmed(np.log(np.asarray(values, np.float64))) for values in (over, under))
    total, least = one.square + two.square, min(one.freedom, two.freedom)
    weights = sum(side.square**2 / side.freedom for side in (one, two)) if least else 0.0
    freedom = max(int(total**2 / weights) if weights else 0, least)
    half = _half(_Trimmed(0.0, total, freedom), level)
    return _interval(one.mean - two.mean, half, min(len(over), len(under)))


def interval_of_mean(values: Sequence[float], level: float = LEVEL) -> Figure:
    """Return the mean of values such as accuracies, and Student's t interval, which is unbounded for a single value."""
    n, value = len(values), mean(values)
    half = t_quantile(level, n - 1) * stdev(values) / n**0.5 if n > 1 else math.inf
    return Figure(value, value - half, value + half, n)


class _Trimmed(NamedTuple):
    mean: float
    square: float
    freedom: int


def _trimmed(values: NDArray[np.float64], trim: float = TRIM) -> _Trimmed:
    cut = int(trim * len(values))  # 0 of up to four
    kept = np.sort(values)[cut : len(values) - cut]
    freedom = len(kept) - 1
    square = math.inf
    if freedom:
        pulled_in = np.clip(values, kept[0], kept[-1])
        square = float(((pulled_in - pulled_in.mean()) ** 2).sum()) / (len(kept) * freedom)
    return _Trimmed(float(kept.mean()), square, freedom)


def _half(one: _Trimmed, level: float) -> float:
    return t_quantile(level, one.freedom) * math.sqrt(one.square) if one.freedom else math.inf


def _interval(log: float, half: float, n: int) -> Ratio:
    # The upper end of two very different rounds may exceed the largest float.
    high = math.exp(log + half) if log + half < MOST else math.inf
    return Ratio(math.exp(log), math.exp(log - half), high, n)


@lru_cache
def t_quantile(level: float, freedom: int) -> float:
    """Return the standard errors to each side of a two-sided interval of Student's t. With t = √ν tan u, its density is
    cos^(ν-1) u on a finite range, integrated numerically: within 1e-4 of tabulated values, without SciPy."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    steps = np.cumsum((density[1:] + density[:-1]) / 2)
    share = np.concatenate([[0], steps]) / steps[-1]
    return float(np.sqrt(freedom) * np.tan(np.interp(level, share, angle)))


def speed_text(value: float) -> str:
    """Format images/s with at least three digits, so that different speeds look different."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


Verdict = Literal["accepted", "dropped", "undecided"]
Kept = Literal["kept", "lost", "undecided"]

LOOKS = (4, 5, 6, 8, 10, 12, 16, 20, 24)  # numbers of rounds after which the test may end
ERROR = 0.005
"""Probability that a change without an effect is accepted, or found to be slower, over all looks together: each look
has an equal part of it (Bonferroni's bound). Ten changes then make one false gain in forty runs."""
WORTH = 1.01  # a change is dropped once a gain of 1 % is excluded
PROCESSES = 1.05
"""What a change must exceed that is measured in two processes: two of the same pipeline differ by some percent as long
as they run, and rounds do not average that (benchmarks/results/tuning.json, ffcv-resnet18-16, measured afterwards: 2 %
in the median of eight rounds)."""
ENOUGH = 0.95
"""Level of the interval that excludes a gain: dropping a change by mistake costs speed, but is not a wrong result."""


def judge(
    ratios: Sequence[float], least: float = 1.0, looks: Sequence[int] = LOOKS, trim: float = TRIM
) -> tuple[Verdict, Ratio]:
    """Return the verdict on a change, and the interval of its ratios of speeds, above `least` if it is accepted. The
    test may end after these numbers of rounds, of which `trim` is left out at each end."""
    n = len(ratios)
    strict = ratio(ratios, 1 - ERROR / len(looks), trim)
    if n not in looks:
        return "undecided", strict
    if strict.low > least:
        return "accepted", strict
    loose = ratio(ratios, ENOUGH, trim)
    if loose.high < max(WORTH, least):
        return "dropped", loose
    return "undecided", strict


SEEDS = (3, 5, 8)  # numbers of pairs of short trainings after which the test of the accuracy may end
MARGIN = 0.005  # a change keeps the accuracy if a loss of half a percentage point is excluded
ACCURACY_ERROR = 0.05
"""Twice the probability that a change with just this loss is accepted: the interval has two ends."""


def judge_accuracy(differences: Sequence[float]) -> tuple[Kept, Figure]:
    """Return whether a change keeps the accuracy, up to `MARGIN`, and by how much it changes it, given one difference
    per seed: the mean, and its confidence interval, by Student's t of the paired differences; each look has an equal
    part of the error (Bonferroni's bound)."""
    found = interval_of_mean(differences, 1 - ACCURACY_ERROR / len(SEEDS))
    if found.n == 1:  # more than any difference
        found = replace(found, low=found.value - 1, high=found.value + 1)
    if found.n not in SEEDS:
        return "undecided", found
    if found.low > -MARGIN:
        return "kept", found
    return "lost" if found.high < -MARGIN else "undecided", found
