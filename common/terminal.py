"""What a terminal shows: whether anybody looks, how much of a long list, and what a long wait is for."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

SHOWN = 20  # lines of a long list


def is_interactive() -> bool:
    """Return whether a user sees progress bars: in a terminal or a notebook, not in a log file."""
    return sys.stderr.isatty() or in_cell()


def ipython_shell() -> Any:
    """Return IPython's shell, or None."""
    # It is a module without the function while another thread imports it, or if a program has replaced it by its own.
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def in_cell() -> bool:
    """Return whether the code runs in a notebook. Some libraries import ipykernel without one, so that only the shell
    in use can show it."""
    shell = ipython_shell()
    return hasattr(shell, "kernel")


def progress_bar(total: float, progress: bool, **options: Any) -> Any:
    """Return a tqdm bar, which shows nothing without `progress`, or in a log file; `options` are tqdm's own."""
    from tqdm.auto import tqdm  # here: loaders show no bar

    return tqdm(total=total, disable=not (progress and is_interactive()), leave=False, **options)


def time_bar(seconds: float, progress: bool) -> Any:
    """Return a bar of the use of so many seconds."""
    share = "{desc}{percentage:3.0f}% of " + f"{seconds:g} s |{{bar}}|"
    return progress_bar(seconds, progress, dynamic_ncols=True, bar_format=share)


def shortened(lines: Sequence[str], verbose: bool = False) -> list[str]:
    """Return the first `SHOWN` lines, and a line with the number of the others; with `verbose` all."""
    if verbose or len(lines) <= SHOWN + 1:
        return list(lines)
    return [*lines[:SHOWN], f"  … and {len(lines) - SHOWN:,} more (--verbose)"]


_SILENT = 5.0  # seconds before a wait is reported for the first time; the pauses after it double


class Wait:
    """One wait of at most `limit` seconds, reported on standard error, with `--quiet` and in a log file, too."""

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
            line = f"{text()} ({self.elapsed:.0f} s of at most {self.limit:g} s)"
            if (bars := sys.modules.get("tqdm")) is not None:
                bars.tqdm.write(line, file=sys.stderr)  # above its bars
            else:
                print(line, file=sys.stderr, flush=True)
