"""`drivetrain watch`: what a run that another process trains has reached."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import click

from ....common.table import screen_width, wrapped
from .options import Command, Place, argument, option


@click.command(cls=Command)
@argument("run", "Folder or address of a run (train --out), finished or not.", Place())
@option("--every SECONDS", "Seconds between two looks.", float, default=5)
@option("--once", "Print one line, and the slowest ranks of several, and end.")
def watch(run: Path | str, every: float, once: bool) -> None:
    """Show what a run has reached, until it ends.

    A line has the epochs, the last and the best metric, and when its files changed, by the clock of the run. With
    --logger prometheus, the run also writes step, loss and images/s within epochs, and what each of several ranks takes
    per step. Ctrl-C ends the watching, not the run.
    """
    from ....common.checks import check_number
    from ....common.errors import PlanError
    from ...runs.analysis.watch import look

    check_number("--every", every, PlanError, "(0, inf)", also=": seconds")
    # In a terminal without control sequences, lines follow each other, as in a log.
    live, line = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not once, ""
    newest, since, rows = "", time.monotonic(), 1
    try:
        while True:
            state = look(run)
            if live:
                if str(state) != newest:
                    newest, since = str(state), time.monotonic()
                rows = _drawn(f"{replace(state, quiet=time.monotonic() - since)}", rows)
            elif (now := str(replace(state, changed=None))) != line:  # a log has no line for a file without news
                line = now
                print(state, flush=True)
            if once and state.ranks:
                print(state.table(), flush=True)
            if once or state.ended:
                break
            time.sleep(every)
    except KeyboardInterrupt:
        pass
    if live:
        print()


def _drawn(text: str, rows: int) -> int:
    """Print a text in place of the one before, which has so many rows of the terminal, and return its own rows: many
    terminals are narrower than it, and a carriage return reaches only its last row."""
    lines = wrapped([text], max(screen_width() - 1, 1))
    up = f"\033[{rows - 1}A" if rows > 1 else ""
    print(f"{up}\r\033[J" + "\n".join(lines), end="", flush=True)
    return len(lines)
