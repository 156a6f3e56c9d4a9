"""Whether a change is faster: a test that may end after any of several looks at the rounds so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..ledger.statistics import Ratio, ratio

Verdict = Literal["accepted", "dropped", "undecided"]

LOOKS = (4, 5, 6, 8, 10, 12, 16, 20, 24)
"""Numbers of rounds after which the test may end."""
ERROR = 0.005
"""Probability that a change without an effect is accepted, or found to be slower, over all looks together: each look
has an equal part of it (Bonferroni's bound). Ten changes then make one false gain in forty runs."""
WORTH = 1.01
"""A change is dropped once a gain of 1 % is excluded."""
ENOUGH = 0.95
"""Level of the interval that excludes a gain: dropping a change by mistake costs speed, but is not a wrong result."""


def judge(ratios: Sequence[float]) -> tuple[Verdict, Ratio]:
    """Return the verdict on a change, and its ratio with the interval that the verdict is from.

    Args:
        ratios: its speed over that without it, one per round, in which both were measured.
    """
    n = len(ratios)
    strict = ratio(ratios, 1 - ERROR / len(LOOKS))
    if n not in LOOKS:
        return "undecided", strict
    if strict.low > 1:
        return "accepted", strict
    loose = ratio(ratios, ENOUGH)
    if loose.high < WORTH or n == LOOKS[-1]:
        return "dropped", loose
    return "undecided", strict
