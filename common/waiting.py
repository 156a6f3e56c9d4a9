"""Waits for other processes and machines: with a limit, and reported to the user while they last."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_SILENT = 5.0  # seconds before a wait is reported for the first time; the pauses after it double


class Wait:
    """One wait of at most `limit` seconds, for the loop that looks whether it is over. It is reported on standard
    error, with `--quiet` and in a log file, too."""

    def __init__(self, limit: float) -> None:
        self.limit, self._begin, self._next = limit, time.monotonic(), _SILENT

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    @property
    def left(self) -> float:
        return self.limit - self.elapsed

    def report(self, text: Callable[[], str]) -> None:
        """Print `text()` if a line is due: after 5 s, and then whenever the wait has become twice as long."""
        if self.elapsed >= self._next:
            self._next = 2 * self.elapsed
            _print_above_bars(f"{text()} ({self.elapsed:.0f} s of at most {self.limit:g} s)")


def _print_above_bars(line: str) -> None:
    if (bars := sys.modules.get("tqdm")) is not None:
        bars.tqdm.write(line, file=sys.stderr)
    else:
        print(line, file=sys.stderr, flush=True)
