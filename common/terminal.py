"""What a terminal shows: whether anybody looks, and how much of a long list."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

SHOWN = 20
"""Lines of a long list."""


def is_interactive() -> bool:
    """Return whether a user sees progress bars: in a terminal or a notebook, not in a log file."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def time_bar(seconds: float, progress: bool) -> Any:
    """Return a tqdm bar of the use of so many seconds, which shows nothing without `progress`, or in a log file."""
    from tqdm.auto import tqdm

    return tqdm(
        total=seconds, disable=not (progress and is_interactive()), leave=False, dynamic_ncols=True,
        bar_format="{desc}{percentage:3.0f}% of " + f"{seconds:g} s |{{bar}}|",
    )  # fmt: skip


def shortened(lines: Sequence[str], verbose: bool = False) -> list[str]:
    """Return the first `SHOWN` lines, and a line with the number of the others; with `verbose` all."""
    if verbose or len(lines) <= SHOWN + 1:
        return list(lines)
    return [*lines[:SHOWN], f"  … and {len(lines) - SHOWN:,} more (--verbose)"]
