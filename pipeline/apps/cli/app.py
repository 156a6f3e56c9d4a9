"""The program `drivetrain` and the commands about itself; the others are in files of their own."""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

import click
from click.exceptions import Exit, NoArgsIsHelpError, NoSuchCommand
from click.shell_completion import BashComplete, add_completion_class, get_completion_class, shell_complete

from ....common.errors import DrivetrainError, PlanError, suggest
from ....common.version import __version__
from .options import RECIPE, Command, Text, argument, option, say

_COMPLETE = "_DRIVETRAIN_COMPLETE"  # the environment variable by which a shell requests completions
# A key that ends in "=" is continued by its value, without a space.
_NO_SPACE = "COMPREPLY+=($value)", 'COMPREPLY+=("$value"); [[ $value == *= ]] && compopt -o nospace'
SHELLS = ("bash", "zsh", "fish")
_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # numbers of errors


@add_completion_class
class Bash(BashComplete):
    """Completion in bash, which divides `key=value` into three words, and puts no space after `key=`."""

    source_template = BashComplete.source_template.replace(*_NO_SPACE)

    def get_completion_args(self) -> tuple[list[str], str]:
        words, incomplete = super().get_completion_args()
        return [word for word in words if word != "="], incomplete


MODULES = {
    "new": "new", "convert": "data", "inspect": "data", "verify": "data", "advise": "data", "show": "analysis",
    "plan": "analysis", "train": "training", "watch": "watch", "folds": "training", "sweep": "sweep",
    "predict": "training",
    "errors": "analysis", "compare": "analysis", "report": "analysis", "export": "training", "serve": "serve",
    "ledger": "training", "tune": "training", "race": "race", "job": "job",
}  # fmt: skip
"""The module of each command that is not here. It is imported for its own commands and for the list of all: `recipes`
starts in three quarters of the time."""


class Program(click.Group):
    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [*MODULES, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(f".{MODULES[cmd_name]}", __package__), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except NoSuchCommand as error:  # click suggests only what is imported already
            raise NoSuchCommand(error.command_name, possibilities=self.list_commands(ctx), ctx=ctx) from None


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
)
@click.version_option(__version__, message="%(prog)s %(version)s", help="Print the version and exit.")
def program() -> None:
    """Train vision models faster, and see exactly which part made them faster."""


@program.command()
@argument(
    "name", "Show this recipe, by name or file: each value, its meaning and its source.", RECIPE,
    required=False,
)  # fmt: skip
@option("--keys", "List the keys of a recipe.")
def recipes(name: str | None, keys: bool) -> None:
    """List the recipes, or show one."""
    if keys and name is not None:
        raise PlanError(f"--keys lists the keys of all recipes. Leave out {name!r:.200}, or --keys to see its values.")
    from ...recipes.table import keys_table, recipe_table, recipes_list

    print(keys_table() if keys else recipes_list() if name is None else recipe_table(name))


@program.command()
@argument("shell", "bash, zsh or fish.", Text(*SHELLS))
def completion(shell: str) -> None:
    """Print a script for completion in a shell.

    It completes commands, options, recipes and files.
    To load it in every new shell:

    \b
    drivetrain completion bash > ~/.local/share/bash-completion/completions/drivetrain
    drivetrain completion zsh > ~/.drivetrain.zsh   # and in ~/.zshrc: source ~/.drivetrain.zsh
    drivetrain completion fish > ~/.config/fish/completions/drivetrain.fish
    """
    written_by = get_completion_class(shell) if shell in SHELLS else None
    if written_by is None:
        raise PlanError(f"There is no completion for the shell {shell!r}.{suggest(shell, SHELLS)}")
    print(written_by(program, {}, "drivetrain", _COMPLETE).source(), end="")


@program.command()
@option("--ranks", "Under torchrun: compare the ranks, and measure how fast they exchange tensors.")
@option("--timeout SECONDS", "With --ranks: how long to wait for a rank. Default: 60.", float)
def doctor(ranks: bool, timeout: float | None) -> int:
    """Report what is missing, and how to install it.

    The exit status is 1 if a core requirement is missing. On several machines, this shows whether they find each other,
    and how fast their network is:

    \b
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 \\
        -m drivetrain doctor --ranks
    """
    if timeout is not None and (not ranks or not 0 < timeout < 1e6):
        raise PlanError(
            f"--timeout {timeout:g} limits how long --ranks waits, in seconds: pass a positive number, and --ranks."
        )
    if ranks:
        from .doctor import examine_ranks

        return 0 if examine_ranks(60.0 if timeout is None else timeout) else 1
    from .doctor import examine

    healthy, report = examine()
    print(report)
    return 0 if healthy else 1


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command in `arguments` (default: the process's) and exit, with a line on stderr after an error."""
    _open_output()
    try:
        if instruction := os.environ.get(_COMPLETE):
            sys.exit(shell_complete(program, {}, "drivetrain", _COMPLETE, instruction))
        status = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except DrivetrainError as error:
        # A note has, e.g., where results are that could not be uploaded.
        say(type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", [])]))
        status = 1
    except KeyboardInterrupt as interrupt:
        say("Interrupted", " ".join(["stopped by Ctrl-C.", *getattr(interrupt, "__notes__", [])]))
        status = 130
    except OSError as error:
        if error.filename is not None:  # e.g. in a folder that the user may not read
            say(type(error).__name__, f"{error.filename}: {error.strerror}.")
        elif error.errno in _OF_OUTPUT:  # its reader, e.g. head, has ended; or the disk is full
            if not isinstance(error, BrokenPipeError):
                say("OSError", f"the output cannot be written: {error.strerror}.")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        else:
            raise
        status = 1
    sys.exit(status)


def _open_output() -> None:
    """Let every text be printed: also where the output was closed (`>&-`), or has an encoding without our signs."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - until the process ends
        elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _run(arguments: list[str]) -> int:
    """Run a command, and return its exit status. click's own `main` would replace Ctrl-C's notes."""
    try:
        with program.make_context("drivetrain", arguments) as context:
            return program.invoke(context) or 0
    except NoArgsIsHelpError as error:
        print(error.format_message())
        return error.exit_code
    except click.UsageError as error:
        text, path = error.format_message(), error.ctx.command_path if error.ctx else "drivetrain"
        say("UsageError", f"{text}{'' if text[-1] in '.?' else '.'} See: {path} --help")
        return error.exit_code
    except Exit as end:  # of --help and --version
        return end.exit_code
