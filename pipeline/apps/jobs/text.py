"""Pieces of job files: templates, quoted values, and the shell commands that several schedulers share."""

from __future__ import annotations

import re
import textwrap

import yaml

from .job import SHUTDOWN_SECONDS

TORCHRUN_PORT = 29400
"""Port of the rendezvous where each job has machines, or pods, of its own; torchrun's default."""

SIGNALS = f"--signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout {SHUTDOWN_SECONDS}"
"""Options of torchrun, so that it forwards signals and waits while the ranks save."""


def fill(template: str, **values: object) -> str:
    """Return a template in which each `@name@` is replaced by a value, in one pass.

    A value that has a line to itself may have several lines, which get its indentation; without text, the line goes.
    """

    def replace(match: re.Match[str]) -> str:
        indent, block, within = match.groups()
        text = f"{values[within or block]}"
        if block and text:
            text = textwrap.indent(text.rstrip("\n") + "\n", indent)
        return text

    return re.sub(r"^( *)@(\w+)@\n|@(\w+)@", replace, template, flags=re.MULTILINE)


def scalar(value: str) -> str:
    """Return text as a quoted YAML value on one line, whatever it contains."""
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=float("inf")).strip()


def literal(key: str, text: str) -> str:
    """Return `key: text` in YAML, line by line if YAML can express the text so, else quoted."""
    return yaml.safe_dump({key: text}, default_style="|", allow_unicode=True, width=float("inf")).rstrip("\n")


_STOPPABLE = """\
stopped=""
trap 'stopped=yes; kill -@signal@ "$@process@" 2>/dev/null' @signal@@note@
@command@ &
@process@=$!
wait "$@process@"; status=$?
while kill -0 "$@process@" 2>/dev/null; do wait "$@process@"; status=$?; done  # a signal ends "wait" early
# Drivetrain has saved and left with 75; torchrun makes a 1 of it.
if [ -n "$stopped" ] && [ "$status" -ne 0 ]; then status=75; fi"""


def stoppable(command: str, process: str, signal: str, note: str = "") -> str:
    """Return shell commands that run `command`, which is torchrun or starts it, forward a signal to it, and wait.

    Afterwards `$status` is its status; 75 if the signal has stopped it, because torchrun ends with 1 then.

    Args:
        command: the shell command.
        process: the shell variable for its process id.
        signal: name of the signal.
        note: comment on the line that forwards it.
    """
    return fill(_STOPPABLE, command=command, process=process, signal=signal, note=note and f"  # {note}")
