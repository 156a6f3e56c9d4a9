"""The ledger's statistics: medians with quartiles, and ratios with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LEVEL = 0.95
"""Of the confidence intervals."""


@dataclass(frozen=True)
class Figure:
    """A measured figure: the median of `n` rounds, and the quartiles around it."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """The geometric mean of `n` ratios, one per round, and its confidence interval, `low` to `high`."""

    value: float
    low: float
    high: float
    n: int

    @property
    def spread(self) -> float:
        """Half the interval's width, as a share of the value: 0.02 for ± 2 %."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf

    def holds(self, value: float) -> bool:
        """Whether `value` lies in the interval."""
        return self.low <= value <= self.high


def figure(values: Sequence[float]) -> Figure:
    """Median and quartiles of a figure's rounds."""
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return Figure(median, low, high, len(values))


def ratio(ratios: Sequence[float], level: float = LEVEL) -> Ratio:
    """The interval of a ratio from its rounds: Student's t, on the logarithms.

    Logarithms, because a ratio and its inverse are then treated alike. One round has no spread, and an
    interval from 0 to infinity.

    Args:
        ratios: positive, one per round; both sides were measured in that round.
        level: share of such intervals that hold the true ratio, where rounds are independent and their
            logarithms normally distributed.
    """
    logs = np.log(np.asarray(ratios, np.float64))
    n, mean = len(logs), float(logs.mean())
    if n == 1:
        return Ratio(math.exp(mean), 0.0, math.inf, 1)
    half = t_quantile(level, n - 1) * float(logs.std(ddof=1)) / np.sqrt(n)
    return _interval(mean, float(half), n)


def ratio_of_means(over: Sequence[float], under: Sequence[float], level: float = LEVEL) -> Ratio:
    """The ratio of two figures that were measured apart, round by round but not in the same rounds.

    Welch's interval on the logarithms, its degrees of freedom rounded down.
    """
    logs = [np.log(np.asarray(values, np.float64)) for values in (over, under)]
    difference = float(logs[0].mean() - logs[1].mean())
    n = min(map(len, logs))
    if n == 1:
        return Ratio(math.exp(difference), 0.0, math.inf, 1)
    parts = [float(log.var(ddof=1)) / len(log) for log in logs]
    freedom = sum(parts) ** 2 / max(
        sum(part**2 / (len(log) - 1) for part, log in zip(parts, logs, strict=True)), 1e-300
    )
    half = t_quantile(level, max(int(freedom), n - 1)) * float(np.sqrt(sum(parts)))
    return _interval(difference, half, n)


def _interval(log: float, half: float, n: int) -> Ratio:
    return Ratio(math.exp(log), math.exp(log - half), math.exp(log + half), n)


@lru_cache
def t_quantile(level: float, freedom: int) -> float:
    """How many standard errors the two-sided interval of Student's t reaches to each side.

    With t = √ν tan u its density is cos^(ν-1) u on a finite range, which is summed up here: within 1e-4
    of the tables' values, without SciPy.
    """
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    steps = np.cumsum((density[1:] + density[:-1]) / 2)
    share = np.concatenate([[0], steps]) / steps[-1]
    return float(np.sqrt(freedom) * np.tan(np.interp(level, share, angle)))
