"""Run `drivetrain` in separate processes."""

import io
import os
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import process_state
import pytest
import torch.distributed as dist
from drivetrain.pipeline.apps.cli.app import main, program
from pipeline_data import CLASSES, Toy

ENVIRONMENT = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}

_CONTEXT = click.Context(program, **program.context_settings)
COMMANDS: dict[str, click.Command] = {
    name: program.get_command(_CONTEXT, name) for name in program.list_commands(_CONTEXT)
}
"""All commands, in the order of `--help`."""


class End(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        assert (self.code, self.err.count("\n"), self.out) == (1, 1, ""), self
        return self.err


def run(*command: str, cwd: Path | None = None, **variables: str) -> End:
    """One command, by the installed program, whose own folder is not on Python's path."""
    program = Path(sys.executable).with_name("drivetrain")
    done = process_state.run(str(program), *command, env=ENVIRONMENT | variables, cwd=cwd)
    return End(done.returncode, done.stdout, done.stderr)


def call(*command: str) -> End:
    """One command in this process, because starting another one takes seconds."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(command)
    return End(int(end.value.code or 0), out.getvalue(), err.getvalue())


def done(*command: str) -> str:
    """What a command prints that must succeed, in this process."""
    end = call(*command)
    assert end.code == 0, end
    return end.out


def done_under_torchrun(*command: str) -> str:
    """`done` on a rank that `launch` has started, with the variables of torchrun."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # unused: the group exists
    variables |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, variables):
        return done(*command)


def call_several(*commands: list[str]) -> list[End]:
    """Several commands in this process, in which warnings are shown, and not errors as in other tests."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")
        for name in ("COLUMNS", "NO_COLOR", "TERM"):
            patch.setenv(name, ENVIRONMENT[name])
        return [call(*command) for command in commands]


def parsed(command: str, *arguments: str) -> dict[str, Any]:
    """The values that a command's function gets; fails if it cannot parse the arguments."""
    return COMMANDS[command].make_context(command, list(arguments), parent=_CONTEXT).params


def toy_values(toy: Toy) -> list[str]:
    return [
        "batch_size=32", "image_size=16", "loading={}", "workers=1", "epochs=2", "precision=fp32",
        "model_options.width=4", f"model_options.num_classes={CLASSES}", "--train", toy.train, "--val", toy.val,
    ]  # fmt: skip
