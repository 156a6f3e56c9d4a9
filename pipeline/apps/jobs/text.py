"""Pieces of job files: quoted values, and the shell commands that several schedulers share."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from .job import SHUTDOWN_SECONDS

TORCHRUN_PORT = 29400
"""Port of the rendezvous where each job has machines, or pods, of its own; torchrun's default."""

SIGNALS = f"--signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout {SHUTDOWN_SECONDS}"
"""Options of torchrun, so that it forwards signals and waits while the ranks save."""


def shell_words(words: Sequence[str], indent: str) -> str:
    """Return words as quoted arguments of a shell command, a few on a line; `indent` begins all lines but the first."""
    lines = [""]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > 75 and lines[-1]:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return f" \\\n{indent}".join(lines)


def scalar(value: str) -> str:
    """Return text as a quoted YAML value on one line, whatever it contains."""
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=float("inf")).strip()


class _Literal(str):
    """Text that YAML shows line by line."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Literal, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def literal(key: str, text: str, indent: str) -> str:
    """Return `key: text` in YAML, line by line if YAML can express the text so, else quoted."""
    entry: Any = {key: _Literal(text)}
    dumped = yaml.dump(entry, Dumper=_Dumper, allow_unicode=True, width=float("inf"))
    return textwrap.indent(dumped, indent).removeprefix(indent).rstrip("\n")


def stoppable(command: str, name: str, signal: str, note: str = "") -> str:
    """Return shell commands that run `command`, which is torchrun or starts it, forward a signal to it, and wait.

    Afterwards `$status` is its status; 75 if the signal has stopped it, because torchrun ends with 1 then.

    Args:
        command: the shell command.
        name: the shell variable for its process id.
        signal: name of the signal.
        note: comment on the line that forwards it.
    """
    return f"""\
stopped=""
trap 'stopped=yes; kill -{signal} "${name}" 2>/dev/null' {signal}{note and f"  # {note}"}
{command.strip()} &
{name}=$!
wait "${name}"; status=$?
while kill -0 "${name}" 2>/dev/null; do wait "${name}"; status=$?; done  # a signal ends "wait" early
# Drivetrain has saved and left with 75; torchrun makes a 1 of it.
if [ -n "$stopped" ] && [ "$status" -ne 0 ]; then status=75; fi"""
