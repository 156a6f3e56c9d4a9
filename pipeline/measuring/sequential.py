"""Whether a change is faster, and whether it keeps the accuracy: tests that may end after any of several looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal

from .statistics import Ratio, ratio, t_quantile

Verdict = Literal["accepted", "dropped", "undecided"]
Kept = Literal["kept", "lost", "undecided"]

LOOKS = (4, 5, 6, 8, 10, 12, 16, 20, 24)
"""Numbers of rounds after which the test may end."""
ERROR = 0.005
"""Probability that a change without an effect is accepted, or found to be slower, over all looks together: each look
has an equal part of it (Bonferroni's bound). Ten changes then make one false gain in forty runs."""
WORTH = 1.01
"""A change is dropped once a gain of 1 % is excluded."""
PROCESSES = 1.05
"""What a change must exceed that is measured in two processes: two of the same pipeline differ by up to 4 % as long as
they run (benchmarks/results/tuning.json, ffcv-resnet18-16), and rounds do not average that."""
ENOUGH = 0.95
"""Level of the interval that excludes a gain: dropping a change by mistake costs speed, but is not a wrong result."""


def judge(ratios: Sequence[float], least: float = 1.0) -> tuple[Verdict, Ratio]:
    """Return the verdict on a change, and its ratio with the interval that the verdict is from.

    Args:
        ratios: its speed over that without it, one per round, in which both were measured.
        least: the ratio that the interval must exceed.
    """
    n = len(ratios)
    strict = ratio(ratios, 1 - ERROR / len(LOOKS))
    if n not in LOOKS:
        return "undecided", strict
    if strict.low > least:
        return "accepted", strict
    loose = ratio(ratios, ENOUGH)
    if loose.high < max(WORTH, least):
        return "dropped", loose
    return "undecided", strict


SEEDS = (3, 5, 8)
"""Numbers of pairs of short trainings after which the test of the accuracy may end."""
MARGIN = 0.005
"""A change keeps the accuracy if a loss of this much, half a percentage point, is excluded."""
ACCURACY_ERROR = 0.05
"""Twice the probability that a change with just this loss is accepted: the interval has two ends."""


@dataclass(frozen=True)
class Difference:
    """The mean difference of `n` pairs of accuracies, and its confidence interval, `low` to `high`."""

    value: float
    low: float
    high: float
    n: int


def judge_accuracy(differences: Sequence[float]) -> tuple[Kept, Difference]:
    """Return whether a change keeps the accuracy, up to `MARGIN`, and by how much it changes it.

    Student's t of the paired differences; each look has an equal part of the error (Bonferroni's bound).

    Args:
        differences: its accuracy less that without it, one per seed, from which both were trained.
    """
    n, value = len(differences), mean(differences)
    half = 1.0  # more than any difference of accuracies
    if n > 1:
        half = t_quantile(1 - ACCURACY_ERROR / len(SEEDS), n - 1) * stdev(differences) / n**0.5
    difference = Difference(value, value - half, value + half, n)
    if n not in SEEDS:
        return "undecided", difference
    if difference.low > -MARGIN:
        return "kept", difference
    return "lost" if difference.high < -MARGIN else "undecided", difference
