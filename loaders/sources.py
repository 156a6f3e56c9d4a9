"""Data sources: a file, a pattern of numbered files that are read as one data set, or several of them with weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, thread_time
from typing import TypeVar

from ..common.checks import is_number, plain
from ..common.errors import DataError
from ..common.threads import in_order

T = TypeVar("T")
R = TypeVar("R")

_MOST = 100_000  # files of a pattern; more is a typing error
_THREADS = 16  # files that are asked for at a time, which hides the latency of a store


@dataclass(frozen=True)
class Part:
    """One data set: its name as given, its files (paths or addresses) in order, and its weight in a mix."""

    name: str
    files: tuple[str, ...]
    weight: float | None = None


@dataclass(frozen=True)
class Files:
    """The files of a data source: one data set, or the data sets of a mix, which have weights."""

    parts: tuple[Part, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file for part in self.parts for file in part.files)

    def __str__(self) -> str:
        if self.weights is None:
            return self.parts[0].name
        return " + ".join(f"{part.weight:g} × {part.name}" for part in self.parts)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The weights of a mix, one per part; None if it is one data set."""
        weights = tuple(part.weight for part in self.parts if part.weight is not None)
        return weights or None

    @property
    def source(self) -> str | dict[str, float]:
        """The source, as a recipe has it."""
        if self.weights is None:
            return self.parts[0].name
        return {part.name: weight for part, weight in zip(self.parts, self.weights, strict=True)}

    def map(self, function: Callable[[str], str | Path]) -> Files:
        """Return the same parts with other files, e.g. with local copies of those at an address."""
        made = map(str, in_threads(function, self.names))
        parts = (replace(part, files=tuple(itertools.islice(made, len(part.files)))) for part in self.parts)
        return Files(tuple(parts))


Source = str | Path | Mapping[str, float] | Files
"""A path or an address; with a range of numbers, such as `train-{000..127}.beton`, all these files in order. Or several
of them, with their weights."""


def files_of(source: Source) -> Files:
    """Return the files that a source names. They are not looked for."""
    if isinstance(source, Files):
        return source
    if not isinstance(source, str | Path | Mapping):
        raise DataError(
            f"A data source is a path, a pattern such as '{{a,b}}.beton', or a dict of them with weights, not a "
            f"{type(source).__name__}."
        )
    if not isinstance(source, Mapping):
        return Files((Part(str(source), expand(str(source))),))
    if not source:
        raise DataError("The data source is empty. Pass a .beton file, or several with weights: {'a.beton': 3, …}.")
    parts = []
    for name, weight in source.items():
        weight = plain(weight)
        if not isinstance(name, str | Path) or not is_number(weight, "(0, inf)"):
            raise DataError(
                f"The data source {{{name!r}: {weight!r}}} must map a .beton file to its weight, a positive number."
            )
        parts.append(Part(str(name), expand(str(name)), float(weight)))
    return Files(tuple(parts))


def expand(pattern: str) -> tuple[str, ...]:
    """Return the names of a pattern, in order, as in bash: `{000..127}` counts with leading zeros, `{a,b}` lists.
    All numbers have the digits of the first, at least: `{00..127}` ends with 127, where bash begins with 000."""
    found = tuple(itertools.islice(_expanded(pattern), _MOST + 1))
    if len(found) > _MOST:
        raise DataError(f"{pattern} stands for more than {_MOST:,} files. Use fewer, larger ones.")
    return found


def _expanded(pattern: str) -> Iterator[str]:
    for brace in re.finditer("{", pattern):
        if (found := _choice(pattern, brace.end())) is not None:
            options, end = found
            for option in options:
                for inner in _expanded(option):  # which may have braces of its own
                    yield from _expanded(pattern[: brace.start()] + inner + pattern[end:])
            return
    yield pattern


def _choice(pattern: str, start: int) -> tuple[Iterable[str], int] | None:
    """Return what the braces whose content begins at `start` choose from, and where they end; None if they are a part
    of the name."""
    parts, begin, depth = list[str](), start, 0
    for at, letter in enumerate(pattern[start:], start):
        if depth == 0 and letter in ",}":
            parts.append(pattern[begin:at])
            begin = at + 1
            if letter == "}":
                break
        depth += (letter == "{") - (letter == "}")
    else:
        return None
    if len(parts) > 1:
        return parts, begin
    if (match := re.fullmatch(r"(\d+)\.\.(\d+)", parts[0])) is None:
        return None
    low, high = match.groups()
    if int(high) < int(low):
        raise DataError(f"{pattern}: the range {{{parts[0]}}} must run upwards.")
    return (f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)), begin


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the results of `function`, in order. If the first takes mostly waiting, as of a store, others are asked
    for at the same time; of files that are at hand, threads would only compete for the interpreter."""
    items = list(items)
    start, own = perf_counter(), thread_time()
    found = [function(item) for item in items[:1]]
    rest = items[1:]
    if not rest or perf_counter() - start < 2 * (thread_time() - own):
        return [*found, *map(function, rest)]
    with closing(in_order(function, rest, min(_THREADS, len(rest)), "drivetrain-open")) as others:
        return [*found, *others]
