"""Consistent speeds with quartiles and ratios with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

K = TypeVar("K", bound=Hashable)

LEVEL = 0.95
"""Level of the confidence intervals."""
TRIM = 0.2
"""Fraction of the rounds trimmed at each end: one of five rounds. The usual choice."""
MOST = 700.0  # approximately the logarithm of the largest float
RESOLVED = 1.0
"""A ratio whose interval extends beyond ± 100 % (a factor of two to each side) is not displayed as a number."""
UNRESOLVED = "not resolved"
"""Replaces such a ratio; a caveat of the ledger gives the reason."""


@dataclass(frozen=True)
class Figure:
    """A measured quantity: its typical `value` over `n` rounds, and the quartiles of the rounds, `low` and `high`."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """A ratio from `n` rounds, taken within each round, and its confidence interval, `low` to `high`."""

    value: float
    low: float
    high: float
    n: int

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
        """The value and its interval; "not resolved" if that is too wide."""
        return f"{self.value:.2f}  ({self.low:.2f} to {self.high:.2f})" if self.resolved else UNRESOLVED

    def holds(self, value: float) -> bool:
        """Return whether the interval contains `value`."""
        return self.low <= value <= self.high


class Levels(Generic[K]):
    """The typical speeds of all variants on one scale, fitted to rounds in which every variant had a trial.

    The model: the logarithm of a trial's speed is the sum of its variant's level, the round's effect (the machine's
    drift, shared by all variants of a round) and noise. A variant's level is the trimmed mean of its trials after
    removing the rounds' effects; a ratio is the ratio of two levels. So the faster of two variants always has a ratio
    above 1, and gains multiply; separately estimated medians of speeds and ratios of rounds could contradict each
    other. With up to four rounds nothing is trimmed, and all values are geometric means.

    Args:
        rounds: positive speeds by variant; every round has all variants.
    """

    def __init__(self, rounds: Sequence[Mapping[K, float]]) -> None:
        names = list(rounds[0])
        logs = np.log(np.array([[speeds[name] for name in names] for speeds in rounds], np.float64))
        drift = np.zeros(len(rounds))
        for _ in range(3):  # Tukey's median polish: one outlier shifts neither its round nor its variant
            centres = np.median(logs - drift[:, None], axis=0)
            drift = np.median(logs - centres, axis=1)
        still = (logs - drift[:, None]).T
        middle = _trimmed(drift).mean
        self._speeds = {name: [speeds[name] for speeds in rounds] for name in names}
        self._logs = dict(zip(names, logs.T, strict=True))
        self._levels = {
            name: _trimmed(trials).mean + middle for name, trials in zip(names, still, strict=True)
        }

    def speed(self, name: K) -> Figure:
        """Return a variant's level, with the quartiles of its measured trials, extended to include it."""
        value, speeds = math.exp(self._levels[name]), self._speeds[name]
        low, high = np.percentile(speeds, [25, 75]).tolist()
        return Figure(value, min(low, value), max(high, value), len(speeds))

    def ratio(self, over: K, under: K, level: float = LEVEL) -> Ratio:
        """Return the speed of one variant over that of another; see `product`."""
        return self.product({over: 1, under: -1} if over != under else {}, level)

    def product(self, powers: Mapping[K, int], level: float = LEVEL) -> Ratio:
        """Return the product of the variants' levels, each to its power; the powers sum to 0.

        The interval is that of `ratio`, for the same product within each round, in which the drift cancels.
        """
        rounds = len(next(iter(self._logs.values())))
        if not any(powers.values()):
            return Ratio(1.0, 1.0, 1.0, rounds)
        within = sum(power * self._logs[name] for name, power in powers.items())
        value = sum(power * self._levels[name] for name, power in powers.items())
        return _interval(value, _half(_trimmed(np.asarray(within)), level), rounds)


def ratio(ratios: Sequence[float], level: float = LEVEL) -> Ratio:
    """Return a ratio with its confidence interval: Student's t of the trimmed mean of the logarithms (Tukey and
    McLaughlin 1963; Yuen 1974).

    Logarithms treat a ratio and its inverse alike. Trimming removes rounds in which the machine was briefly busy, one
    of which would shift a mean and widen its interval. The interval of a single round is from 0 to infinity.

    Args:
        ratios: positive ratios, one per round, in which both sides were measured.
        level: fraction of such intervals that contain the true ratio, if rounds are independent and their logarithms
            normally distributed.
    """
    one = _trimmed(np.log(np.asarray(ratios, np.float64)))
    return _interval(one.mean, _half(one, level), len(ratios))


def ratio_of_means(over: Sequence[float], under: Sequence[float], level: float = LEVEL) -> Ratio:
    """Return the ratio of two quantities measured in separate rounds.

    As `ratio`, with Welch's degrees of freedom, rounded down.
    """
    one, two = (_trimmed(np.log(np.asarray(values, np.float64))) for values in (over, under))
    total, least = one.square + two.square, min(one.freedom, two.freedom)
    weights = sum(side.square**2 / side.freedom for side in (one, two)) if least else 0.0
    freedom = max(int(total**2 / weights) if weights else 0, least)
    return _interval(
        one.mean - two.mean, _half(_Trimmed(0.0, total, freedom), level), min(len(over), len(under))
    )


class _Trimmed(NamedTuple):
    """A trimmed mean, its squared standard error, and the degrees of freedom."""

    mean: float
    square: float
    freedom: int


def _trimmed(values: NDArray[np.float64]) -> _Trimmed:
    """Return the trimmed mean; up to four values are not trimmed."""
    cut = int(TRIM * len(values))
    kept = np.sort(values)[cut : len(values) - cut]
    freedom = len(kept) - 1
    square = math.inf
    if freedom:
        pulled_in = np.clip(values, kept[0], kept[-1])
        square = float(((pulled_in - pulled_in.mean()) ** 2).sum()) / (len(kept) * freedom)
    return _Trimmed(float(kept.mean()), square, freedom)


def _half(one: _Trimmed, level: float) -> float:
    """Return half the width of an interval of logarithms."""
    return t_quantile(level, one.freedom) * math.sqrt(one.square) if one.freedom else math.inf


def _interval(log: float, half: float, n: int) -> Ratio:
    # The upper end of two very different rounds may exceed the largest float.
    high = math.exp(log + half) if log + half < MOST else math.inf
    return Ratio(math.exp(log), math.exp(log - half), high, n)


@lru_cache
def t_quantile(level: float, freedom: int) -> float:
    """Return how many standard errors the two-sided interval of Student's t extends to each side.

    With t = √ν tan u, its density is cos^(ν-1) u on a finite range, integrated numerically here: within 1e-4 of
    tabulated values, without SciPy.
    """
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    steps = np.cumsum((density[1:] + density[:-1]) / 2)
    share = np.concatenate([[0], steps]) / steps[-1]
    return float(np.sqrt(freedom) * np.tan(np.interp(level, share, angle)))


def speed_text(value: float) -> str:
    """Format images/s with at least three digits, so that different speeds look different."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
