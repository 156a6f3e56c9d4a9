"""Parse the arguments of a command with argparse, configured by the signature of the command's function."""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

from ....common.errors import PlanError, suggest
from ....common.storage.addresses import is_address

Completes = str | tuple[str, ...]
"""What a shell completes an argument with: `"files"`; `"recipes"`; `"keys"`, of a recipe; these words; "": nothing."""


Quiet = Annotated[bool, "Print only errors, the result and what was requested: no progress, no warnings."]
Verbose = Annotated[bool, "Print long lists in full."]
Place = Path | str
"""A path, or the address of a run."""


@dataclass(frozen=True)
class Argument:
    """An argument of a command, for the shell's completion.

    Attributes:
        name: with its dashes, if it is an option.
        help: what it is.
        values: how many values an option takes.
        several: whether any number of words can be given, for an argument that is not an option.
        completes: see `Completes`.
    """

    name: str
    help: str
    values: int
    several: bool
    completes: Completes

    @property
    def option(self) -> bool:
        """Whether it is an option."""
        return self.name.startswith("-")


class Parser(argparse.ArgumentParser):
    """A parser of a function's arguments, which reports errors as one line.

    Each parameter is `Annotated[type, help]`, `Annotated[type, help, metavar]` or `Annotated[type, help, metavar,
    Completes]`. Keyword-only parameters are options, which may be given once, or repeatedly if they are sequences; a
    bool takes no value, a tuple several. A path completes with files.

    Args:
        name: name of the command.
        function: the function; its docstring is the description.
        more: passed to argparse.

    Attributes:
        arguments: in order.
    """

    def __init__(self, name: str, function: Callable[..., Any], **more: Any) -> None:
        super().__init__(
            prog=name,
            description=_fitted(inspect.getdoc(function) or ""),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32),
            add_help=False,
            allow_abbrev=False,
            **more,
        )
        self.add_argument("-h", "--help", action="help", help="Show this message and exit.")
        self._options = ["-h", "--help"]
        self.arguments = [Argument("--help", "Show this message and exit.", 0, False, "")]
        hints = get_type_hints(function, include_extras=True)
        for parameter in inspect.signature(function).parameters.values():
            self._add(parameter, *get_args(hints[parameter.name]))

    def _add(
        self,
        parameter: inspect.Parameter,
        kind: Any,
        text: str,
        metavar: Any = None,
        completes: Completes = "",
    ) -> None:
        """Add the argument of a parameter. If not given, it has no value, and the function's default applies."""
        anywhere = kind in (Place, Place | None)
        if get_origin(kind) is UnionType:
            kind = get_args(kind)[0]  # the other is None
        several, inner = get_origin(kind) is Sequence, get_args(kind) or (kind,)
        action: Any = "store"
        nargs: Any = None if parameter.default is parameter.empty else "*" if several else "?"
        name = parameter.name
        if parameter.kind is parameter.KEYWORD_ONLY:
            action = "append" if several else _Once
            nargs = 0 if kind is bool else len(inner) if len(inner) > 1 else None
            name = f"--{name.replace('_', '-')}"
            self._options.append(name)
            text += f" Default: {parameter.default}." if parameter.default else ""
        values = 0 if kind is bool else len(inner)
        completes = completes or ("files" if inner[0] is Path else "")
        self.arguments.append(Argument(name, text, values, several, completes))
        convert = _place if anywhere else _path if inner[0] is Path else inner[0]
        self.add_argument(
            name, action=action, nargs=nargs, type=convert, metavar=metavar, default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),  # argparse formats it with `%`
        )  # fmt: skip

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the values of the given parameters. Exit with a message if the arguments are invalid."""
        # Intermixed parsing allows options between arguments, but does not support "--".
        parse = self.parse_known_args if "--" in arguments else self.parse_known_intermixed_args
        given, rest = parse(arguments)
        for word in rest:
            if word.startswith("-"):
                self.error(f"No such option: {word}.{suggest(word.partition('=')[0], self._options)}")
        if rest:
            self.error(f"Too many arguments: {' '.join(rest)}.")
        return vars(given)

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit with status 2."""
        say("UsageError", f"{message[0].upper()}{message[1:].rstrip('.')}. See: {self.prog} --help")
        sys.exit(2)


class _Once(argparse.Action):
    """Store the value of an option that may be given only once; True if it takes no value."""

    def __call__(self, _: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise PlanError(f"{option_string} is given 2 times. Pass it once.")
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def _place(text: str) -> str | Path:
    return text if is_address(text) else _path(text)


def _path(text: str) -> Path:
    if not text:  # Path("") is this folder; in a script, "" is usually an unset variable
        raise argparse.ArgumentTypeError("it is empty. Pass a path; '.' for this folder.")
    if is_address(text):
        raise argparse.ArgumentTypeError(f"{text} is an address. Pass a path of this machine.")
    return Path(text)


def say(head: str, text: str) -> None:
    """Print a line on stderr: an error or a warning."""
    colored = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"\033[1;31m{head}:\033[0m {text}" if colored else f"{head}: {text}", file=sys.stderr)


def listed(functions: dict[str, Callable[..., Any]]) -> str:
    """Return a list of commands with the first lines of their docstrings."""
    return "\n".join(
        textwrap.fill(f"{function.__doc__}".partition("\n")[0], _width(), initial_indent=f"  {name:<11}",
                      subsequent_indent=" " * 13)
        for name, function in functions.items()
    )  # fmt: skip


def _fitted(text: str) -> str:
    """Return a text with its paragraphs filled to the terminal's width, except indented ones."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else textwrap.fill(part, _width()) for part in paragraphs)


def _width() -> int:
    """Return the width of argparse's help."""
    return shutil.get_terminal_size().columns - 2
