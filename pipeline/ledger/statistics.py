"""The ledger's statistics: speeds with quartiles, and ratios with confidence intervals, which cannot contradict."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

K = TypeVar("K", bound=Hashable)

LEVEL = 0.95
"""Of the confidence intervals."""
TRIM = 0.2
"""Share of the rounds that is left out at each end; of five rounds, one. The usual choice."""


MOST = 700.0  # the logarithm of a float's upper end, about
RESOLVED = 1.0
"""A ratio whose interval reaches further than ± 100 % (a factor of two to each side) is not shown as a number."""


@dataclass(frozen=True)
class Figure:
    """A measured figure: its typical `value` over `n` rounds, and the quartiles of the rounds around it."""

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
        """Half the interval's width, as a share of the value: 0.02 for ± 2 %."""
        return math.sqrt(self.high / self.low) - 1 if self.low > 0 else math.inf

    @property
    def resolved(self) -> bool:
        """Whether the interval is narrow enough for the value to mean something: a factor of two to each side."""
        return self.spread <= RESOLVED

    def holds(self, value: float) -> bool:
        """Whether `value` lies in the interval."""
        return self.low <= value <= self.high


def quartiles(values: Sequence[float], value: float) -> Figure:
    """A figure with the quartiles of its rounds, which are moved to `value` where they do not include it."""
    low, high = np.percentile(values, [25, 75]).tolist()
    return Figure(value, min(low, value), max(high, value), len(values))


class Levels(Generic[K]):
    """The typical speed of each variant, all on one scale, fitted to rounds in which every variant had a trial.

    The logarithm of a trial's speed is taken as the sum of its variant's level, of the round's own effect (the
    machine's drift, which all variants of a round share) and of noise. A variant's level is the trimmed mean of its
    trials with the rounds' effects taken out. A ratio of two variants is the ratio of their levels. So the faster of
    two speeds is always the one whose ratio is above 1, and gains multiply: medians of speeds and ratios of rounds,
    each estimated alone, may differ in sign. Up to four rounds nothing is trimmed, and all of it is geometric means.

    Args:
        rounds: speeds by variant, positive; each round has all of them.
    """

    def __init__(self, rounds: Sequence[Mapping[K, float]]) -> None:
        names = list(rounds[0])
        logs = np.log(np.array([[speeds[name] for name in names] for speeds in rounds], np.float64))
        drift = np.zeros(len(rounds))
        for _ in range(3):  # Tukey's median polish: one odd trial moves neither its round nor its variant
            centres = np.median(logs - drift[:, None], axis=0)
            drift = np.median(logs - centres, axis=1)
        still = (logs - drift[:, None]).T
        middle = trimmed_mean(drift)
        self._speeds = {name: [speeds[name] for speeds in rounds] for name in names}
        self._logs = dict(zip(names, logs.T, strict=True))
        self._levels = {
            name: trimmed_mean(trials) + middle for name, trials in zip(names, still, strict=True)
        }

    def speed(self, name: K) -> Figure:
        """A variant's level, with the quartiles of its trials as they were measured."""
        return quartiles(self._speeds[name], math.exp(self._levels[name]))

    def ratio(self, over: K, under: K, level: float = LEVEL) -> Ratio:
        """The speed of one variant over that of another; see `product`."""
        powers = dict.fromkeys((over, under), 0)
        powers[over] += 1
        powers[under] -= 1
        return self.product(powers, level)

    def product(self, powers: Mapping[K, int], level: float = LEVEL) -> Ratio:
        """The product of the variants' levels, each to its power, which sum to 0.

        The interval is that of `ratio`, from the same product within each round, where the drift cancels.
        """
        rounds = len(next(iter(self._logs.values())))
        if not any(powers.values()):
            return Ratio(1.0, 1.0, 1.0, rounds)
        within = sum(power * self._logs[name] for name, power in powers.items())
        value = sum(power * self._levels[name] for name, power in powers.items())
        _, square, freedom = _trimmed_logs(np.asarray(within))
        return _interval(value, _half(square, freedom, level), rounds)


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
    return _interval(mean, _half(square, freedom, level), len(ratios))


def _half(square: float, freedom: int, level: float) -> float:
    """Half the width of an interval of logarithms, from the standard error squared."""
    return t_quantile(level, freedom) * math.sqrt(square) if freedom else math.inf


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
    return _trimmed_logs(np.log(np.asarray(values, np.float64)))


def _kept(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values in order, without the outer ones."""
    cut = int(TRIM * len(values))
    return np.sort(values)[cut : len(values) - cut]


def trimmed_mean(values: NDArray[np.float64]) -> float:
    """The mean without the outer values; of up to four values, of all."""
    return float(_kept(values).mean())


def _trimmed_logs(logs: NDArray[np.float64]) -> tuple[float, float, int]:
    kept = _kept(logs)
    freedom = len(kept) - 1
    if not freedom:
        return float(kept.mean()), math.inf, 0
    pulled_in = np.clip(logs, kept[0], kept[-1])
    square = float(((pulled_in - pulled_in.mean()) ** 2).sum()) / (len(kept) * freedom)
    return float(kept.mean()), square, freedom


def _interval(log: float, half: float, n: int) -> Ratio:
    # Two rounds that differ a lot give an end that no float holds.
    high = math.exp(log + half) if log + half < MOST else math.inf
    return Ratio(math.exp(log), math.exp(log - half), high, n)


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


def speed_text(value: float) -> str:
    """Images/s to three digits or more, so that two speeds that differ look different."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
