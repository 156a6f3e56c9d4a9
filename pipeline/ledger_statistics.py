"""The ledger's statistics: medians with quartiles, and ratios with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LEVEL = 0.95
"""Of the confidence intervals."""
TRIM = 0.2
"""Share of the rounds that is left out at each end; of five rounds, one. The usual choice."""


@dataclass(frozen=True)
class Figure:
    """A measured figure: the median of `n` rounds, and the quartiles around it."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """The trimmed geometric mean of `n` ratios, one per round, and its confidence interval, `low` to `high`."""

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
    """The interval of a ratio from its rounds: Student's t of the trimmed mean of the logarithms (Tukey and
    McLaughlin 1963; Yuen 1974).

    Logarithms, because a ratio and its inverse are then treated alike; trimmed, because now and then a machine
    does something else for a moment, and one such round would move a mean and widen its interval. One
    round has no spread, and an interval from 0 to infinity.

    Args:
        ratios: positive, one per round; both sides were measured in that round.
        level: share of such intervals that hold the true ratio, where rounds are independent and their
            logarithms normally distributed.
    """
    mean, square, freedom = _trimmed(ratios)
    half = t_quantile(level, freedom) * math.sqrt(square) if freedom else math.inf
    return _interval(mean, half, len(ratios))


def ratio_of_means(over: Sequence[float], under: Sequence[float], level: float = LEVEL) -> Ratio:
    """The ratio of two figures that were measured apart, each in rounds of its own.

    As `ratio`, with Welch's degrees of freedom, rounded down.
    """
    parts = [_trimmed(values) for values in (over, under)]
    least = min(freedom for _, _, freedom in parts)
    half = math.inf
    if least:
        total = sum(square for _, square, _ in parts)
        weights = sum(square**2 / freedom for _, square, freedom in parts)
        half = t_quantile(level, max(int(total**2 / weights) if weights else 0, least)) * math.sqrt(total)
    return _interval(parts[0][0] - parts[1][0], half, min(len(over), len(under)))


def _trimmed(values: Sequence[float]) -> tuple[float, float, int]:
    """Of the values' logarithms: trimmed mean, its standard error squared, and degrees of freedom."""
    logs = np.sort(np.log(np.asarray(values, np.float64)))
    cut = int(TRIM * len(logs))
    kept = logs[cut : len(logs) - cut]
    freedom = len(kept) - 1
    if not freedom:
        return float(kept.mean()), math.inf, 0
    pulled_in = np.clip(logs, kept[0], kept[-1])
    square = float(((pulled_in - pulled_in.mean()) ** 2).sum()) / (len(kept) * freedom)
    return float(kept.mean()), square, freedom


def _interval(log: float, half: float, n: int) -> Ratio:
    return Ratio(
        math.exp(log), math.exp(log - half), math.exp(log + half) if half < math.inf else math.inf, n
    )


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
