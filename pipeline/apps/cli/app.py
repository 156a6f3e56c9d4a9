"""The command line: `drivetrain convert | inspect | verify | advise | train | predict | export | ledger | tune |
job | recipes | completion | doctor`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, NoReturn

from ....common.errors import DrivetrainError, PlanError, suggest
from ....common.signals import interrupts_held
from ....common.version import __version__
from . import data, job, predict, training
from .parser import Parser, listed, say


def recipes(
    name: Annotated[
        str | None,
        "Show this recipe, by name or file: each value, its meaning and its source.",
        None,
        "recipes",
    ] = None,
    *,
    keys: Annotated[bool, "List the keys of a recipe."] = False,
) -> None:
    """List the recipes, or show one."""
    from ...recipes.table import keys_table, recipe_table, recipes_table

    print(keys_table() if keys else recipes_table() if name is None else recipe_table(name))


def doctor(
    *,
    ranks: Annotated[
        bool, "Under torchrun: compare the ranks, and measure how fast they exchange tensors."
    ] = False,
    timeout: Annotated[
        float | None, "With --ranks: how long to wait for a rank. Default: 60.", "SECONDS"
    ] = None,
) -> int:
    """Report what is installed, in which version, what is missing and how to install it.

    The exit status is 1 if a core requirement is missing. On several machines, this shows whether they find each other,
    and how fast their network is:

      torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 \\
          -m drivetrain doctor --ranks
    """
    if timeout is not None and (not ranks or not 0 < timeout < 1e6):
        raise PlanError(
            f"--timeout {timeout:g} limits how long --ranks waits, in seconds: pass a positive number, and --ranks."
        )
    if ranks:
        from .doctor_ranks import examine_ranks

        return 0 if examine_ranks(60.0 if timeout is None else timeout) else 1
    from .doctor import examine

    healthy, report = examine()
    print(report)
    return 0 if healthy else 1


def completion(
    shell: Annotated[str, "bash, zsh or fish.", None, ("bash", "zsh", "fish")],
) -> None:
    """Print a script that completes commands, options, recipes and files in a shell.

    Completing starts no Python. To load it in every new shell:

      drivetrain completion bash > ~/.local/share/bash-completion/completions/drivetrain
      drivetrain completion zsh > ~/.drivetrain.zsh   # and in ~/.zshrc: source ~/.drivetrain.zsh
      drivetrain completion fish > ~/.config/fish/completions/drivetrain.fish
    """
    from .completion import script

    print(script(shell, COMMANDS, _overview), end="")


COMMANDS: dict[str, Callable[..., int | None]] = {
    function.__name__: function
    for function in (data.convert, data.inspect, data.verify, data.advise, training.train, predict.predict,
                     training.export, training.ledger, training.tune, job.job, recipes, completion, doctor)
}  # fmt: skip
"""The commands by name. Each returns its exit status, or None for 0."""


def _overview(*, version: Annotated[bool, "Print the version and exit."] = False) -> None:
    """Fast training of PyTorch image models: FFCV loading, model surgery and a distribution strategy behind one
    pipeline, and a ledger that measures what each of them brings."""


def _run(arguments: Sequence[str]) -> int:
    """Run a command; without one, print the version or the overview. Return the exit status."""
    command = arguments[0] if arguments else ""
    if command in COMMANDS:
        function = COMMANDS[command]
        with interrupts_held():  # argparse clears up with attributes that it may not have set yet
            values = Parser(f"drivetrain {command}", function).parse(arguments[1:])
        with _plain_warnings(hidden=values.get("quiet", False)), _heard():
            return function(**values) or 0
    usage, epilog = "drivetrain COMMAND [ARGUMENTS]", f"commands:\n{listed(COMMANDS)}"
    parser = Parser("drivetrain", _overview, usage=usage, epilog=epilog)
    if command and not command.startswith("-"):
        parser.error(f"No such command {command!r}.{suggest(command, COMMANDS)}")
    if parser.parse(arguments):
        print(f"drivetrain {__version__}")
        return 0
    parser.print_help()
    return 2


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command in `arguments`, by default those of the process, and exit with its status.

    Drivetrain's errors and Ctrl-C are reported as a line on stderr.
    """
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except DrivetrainError as error:
        say(type(error).__name__, str(error))
        status = 1
    except KeyboardInterrupt as interrupt:
        say("Interrupted", " ".join(["stopped by Ctrl-C.", *getattr(interrupt, "__notes__", [])]))
        status = 130
    except BrokenPipeError:  # the reader of the output, e.g. head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        status = 1
    sys.exit(status)


def _heard() -> AbstractContextManager[None]:
    """Return what lets the other ranks of a job know of an error, e.g. a recipe that this machine does not have."""
    if "WORLD_SIZE" not in os.environ:  # saves the time of importing torch
        return nullcontext()
    from ....strategies.launching.meeting import failures_posted

    return failures_posted()


@contextmanager
def _plain_warnings(*, hidden: bool) -> Iterator[None]:
    """Inside the block, print Drivetrain's warnings like its errors: one line, without source code; or hide them."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            if category.__module__.startswith(f"{__package__.partition('.')[0]}."):
                if not hidden:
                    say(category.__name__, str(message))
            else:
                others(message, category, *args, **kwargs)

        warnings.showwarning = show
        yield
