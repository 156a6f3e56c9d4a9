"""`drivetrain watch`: what a run that another process trains has reached."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import click

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
    live, line = sys.stdout.isatty() and not once, ""
    newest, since = "", time.monotonic()
    try:
        while True:
            state = look(run)
            if live:
                if str(state) != newest:
                    newest, since = str(state), time.monotonic()
                print(f"\r{replace(state, quiet=time.monotonic() - since)}\033[K", end="", flush=True)
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
