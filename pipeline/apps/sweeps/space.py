"""The values of a sweep, from the command line: `optimizer.lr=0.1,0.3`, `seed=0..4`; a grid, or a random search."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ....common.errors import PlanError

SEED = "seed"
MOST = 10_000  # runs of one sweep
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_DRAWS = 100  # for each combination of a random search, until all that there are must have been found
_LONGEST = 100  # characters of a folder's name

Values = dict[str, str]
"""Texts by key, as `drivetrain train` takes them: `KEY=TEXT`."""


@dataclass(frozen=True)
class Axis:
    """The values of one key: some texts, or all numbers from `low` to `high`."""

    key: str
    texts: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def parse(cls, pair: str) -> Axis:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise PlanError(f"{pair!r} is not KEY=VALUES, as in optimizer.lr=0.1,0.3 or seed=0..4.")
        texts: list[str] = []
        parts = split(text)
        for part in parts:
            span = _RANGE.fullmatch(part)
            if span is None:
                texts.append(part)
                continue
            ends = span.groups()
            low, high = map(float, ends)
            if not low < high < math.inf:
                raise PlanError(f"{pair}: the range {part} must go from a smaller number to a larger one.")
            if all(re.fullmatch(r"[+-]?\d+", end) for end in ends):
                if high - low >= MOST:
                    raise PlanError(f"{pair}: {part} has more than {MOST:,} values. Pass fewer.")
                texts += map(str, range(int(ends[0]), int(ends[1]) + 1))
            elif len(parts) > 1:
                raise PlanError(f"{pair}: a range of real numbers, {part}, cannot be one of several values.")
            else:
                return cls(key, low=low, high=high)
        if twice := sorted({one for one in texts if texts.count(one) > 1}):
            raise PlanError(f"{pair}: {', '.join(twice)} is given twice. Pass each value once.")
        return cls(key, tuple(texts))

    def draw(self, generator: random.Random) -> str:
        """Return a value; of positive real numbers that span a factor of 10, by its logarithm."""
        if self.texts:
            return generator.choice(self.texts)
        if self.low > 0 and self.high >= 10 * self.low:
            return f"{math.exp(generator.uniform(math.log(self.low), math.log(self.high))):.4g}"
        return f"{generator.uniform(self.low, self.high):.4g}"


def split(text: str) -> list[str]:
    """Divide at commas that are not within brackets or quotes of JSON."""
    parts, depth, quoted, escaped = [""], 0, False, False
    for sign in text:
        if not quoted:
            depth += (sign in "[{") - (sign in "]}")
        if sign == '"' and not escaped:
            quoted = not quoted
        escaped = quoted and sign == "\\" and not escaped
        if sign == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


@dataclass(frozen=True)
class Space:
    """The combinations of a sweep without `seed`, and the seeds with which each is trained; () if none are given."""

    fixed: Values
    combinations: tuple[Values, ...]
    seeds: tuple[str, ...]

    def runs(self) -> list[Values]:
        """Return the values of every run that differ between them."""
        return [one | ({SEED: seed} if seed else {}) for one in self.combinations for seed in self.seeds or ("",)]


def space(pairs: Sequence[str], count: int | None = None, seed: int = 0) -> Space:
    """Return the combinations of `KEY=VALUES`: all, or `count` drawn at random, with `seed`.

    Raises:
        PlanError: for what is not `KEY=VALUES`, a range of real numbers in a grid, or more than 10,000 runs.
    """
    axes = [Axis.parse(pair) for pair in pairs]
    keys = [axis.key for axis in axes]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise PlanError(f"{', '.join(twice)} is given twice. Pass all values of a key together: KEY=A,B.")
    fixed = {axis.key: axis.texts[0] for axis in axes if len(axis.texts) == 1}
    free = [axis for axis in axes if axis.key not in fixed and axis.key != SEED]
    seeds = next((axis for axis in axes if axis.key == SEED and SEED not in fixed), Axis(SEED))
    if seeds.low < seeds.high:
        raise PlanError("seed takes whole numbers, as in seed=0..4.")
    number = math.prod(len(axis.texts) or MOST for axis in free)
    if count is not None:
        number = min(count, number) if all(axis.texts for axis in free) else count
    if count is None and (real := [axis.key for axis in free if not axis.texts]):
        raise PlanError(
            f"{real[0]} is a range of real numbers, of which a grid has no end. List its values, {real[0]}=A,B,C, or "
            "pass --random N."
        )
    if number * max(len(seeds.texts), 1) > MOST:
        raise PlanError(f"These are more than {MOST:,} runs. Pass fewer values, or --random N.")
    made = _drawn(free, number, random.Random(seed))
    return Space(fixed, tuple(made), seeds.texts)


def _drawn(axes: Sequence[Axis], count: int, generator: random.Random) -> list[Values]:
    """Return different combinations, as drawn; all of them, in order, if there are no more than `count`."""
    if all(axis.texts for axis in axes) and math.prod(len(axis.texts) for axis in axes) <= count:
        return [
            dict(zip([axis.key for axis in axes], each, strict=True))
            for each in product(*(axis.texts for axis in axes))
        ]
    found: dict[tuple[str, ...], Values] = {}
    for _ in range(_DRAWS * count):
        one = {axis.key: axis.draw(generator) for axis in axes}
        found.setdefault(tuple(one.values()), one)
        if len(found) == count:
            break
    return [*found.values()]


def name_of(values: Values) -> str:
    """Return the name of a run's folder: `optimizer.lr=0.1,seed=0`. Of values that no file's name can have, or that are
    too long, a digest makes it unique."""
    whole = ",".join(f"{key}={text}" for key, text in values.items()) or "run"
    plain = re.sub(r"[^\w.=,+-]", "_", whole, flags=re.ASCII)
    if plain == whole and len(whole) <= _LONGEST:
        return whole
    return f"{plain[:_LONGEST]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
