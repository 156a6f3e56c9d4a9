"""Completion in a shell: what is offered, and that the shells' scripts load."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from command_line import COMMANDS, ENVIRONMENT, call
from drivetrain import RECIPES
from drivetrain.pipeline.apps.cli.app import SHELLS, Bash, program
from drivetrain.pipeline.recipes.presets import KEYS
from process_state import run

FILES = {"file"}
"""A shell's own completion of files, here."""
OFFERS: list[tuple[str, set[str]]] = [
    ("in", {"inspect"}),
    ("--", {"--help", "--version"}),
    ("train cifar10-q", {"cifar10-quickstart"}),
    ("train mi", FILES),
    ("train ", {*RECIPES}),
    ("train --le", {"--ledger", "--ledger-seconds"}),
    ("train baseline batch_", {"batch_size="}),
    ("train baseline ", {f"{key}=" for key in KEYS} - {"notes=", "trained="}),
    ("train baseline epochs = 3 see", {"seed="}),
    ("train baseline epochs=3 see", {"seed="}),
    ("train --out ", FILES),
    ("train --out a", FILES),
    ("train --out x cifar10-q", {"cifar10-quickstart"}),
    ("train baseline train =", FILES),
    ("train baseline train = mi", FILES),
    ("train baseline train=mi", {"train=mine.yaml"}),
    ("train baseline epochs =", set()),
    ("train baseline --ledger seed", {"seed="}),
    ("train --logger ", {"csv", "prometheus", "otel", "tensorboard", "wandb", "mlflow"}),
    ("train --ledger-seconds ", set()),
    ("ledger --compare x mi", FILES),
    ("export run x --format ", {"safetensors", "torch-export", "onnx"}),
    ("export run x --format = to", {"torch-export"}),
    ("recipes cifar10-q", {"cifar10-quickstart"}),
    ("predict run x.jpg mi", FILES),
    ("job ", {"slurm", "kubernetes", "jobset", "ray", "skypilot"}),
    ("job slurm cifar10-q", {"cifar10-quickstart"}),
    ("job slurm mine.yaml --nodes 1 see", {"seed="}),
    ("completion ", {"bash", "zsh", "fish"}),
    ("doctor ", set()),
    ("nonsense ", {*COMMANDS}),
]  # fmt: skip


def offered(line: str) -> set[str]:
    """What is offered for the last word of a line after `drivetrain`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMP_WORDS", f"drivetrain {line}")
        patch.setenv("COMP_CWORD", f"{len(line.split(' '))}")
        found = Bash(program, {}, "drivetrain", "_DRIVETRAIN_COMPLETE").complete().splitlines()
    return {"file" if one.startswith("file,") else one.removeprefix("plain,") for one in found}


@pytest.mark.parametrize(("line", "words"), OFFERS, ids=[line for line, _ in OFFERS])
def test_commands_options_recipes_and_files_are_offered(
    line: str, words: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").touch()
    assert offered(line) == words


def test_every_command_and_option_is_offered() -> None:
    assert offered("") == {*COMMANDS}
    for name in COMMANDS:
        shown = {word.rstrip(",") for word in call(name, "--help").out.split() if word.startswith("--")}
        assert offered(f"{name} --") <= shown
        assert "--help" in offered(f"{name} --")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A folder with the shells' scripts, and a program that they can start."""
    for shell in SHELLS:
        end = call("completion", shell)
        assert end.code == 0, end.err
        (tmp_path / f"drivetrain.{shell}").write_text(end.out)
    (tmp_path / "drivetrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m drivetrain "$@"\n')
    (tmp_path / "drivetrain").chmod(0o755)
    return tmp_path


def reply(shell: str, commands: str, folder: Path) -> set[str]:
    """The lines that a shell prints after it has loaded its script."""
    load = f"source {shlex.quote(str(folder / f'drivetrain.{shell}'))}"
    plain = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}[shell]
    environment = {**ENVIRONMENT, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = run(shell, plain, "-c", commands.replace("LOAD", load), timeout=60, cwd=folder, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return {*done.stdout.splitlines()} - {""}


@pytest.mark.process
def test_bash_completes(script: Path) -> None:
    ask = (
        "LOAD; compopt() { echo compopt $*; }; COMP_WORDS=(drivetrain train baseline see); COMP_CWORD=3; "
        "_drivetrain_completion drivetrain; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    assert reply("bash", ask, script) == {"seed=", "compopt -o nospace"}
    assert reply("bash", ask.replace("baseline see", "--out ''"), script) == {"compopt -o default"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(script: Path) -> None:
    ask = (
        "autoload -U compinit; compinit -u -D; LOAD; compadd() { print -l $completions }; "
        "words=(drivetrain train cifar10-q); CURRENT=3; _drivetrain_completion"
    )
    assert "cifar10-quickstart" in reply("zsh", ask, script)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(script: Path) -> None:
    for line, word in (
        ("drivetrain tr", "train"),
        ("drivetrain train cifar10-q", "cifar10-quickstart"),
        ("drivetrain export a b --format to", "torch-export"),
        ("drivetrain train --ou", "--out"),
    ):
        offers = reply("fish", f"LOAD; complete -C {shlex.quote(line)}", script)
        assert word in {offer.partition("\t")[0] for offer in offers}


def test_another_shell_is_refused() -> None:
    assert "no completion for the shell 'bahs'. Did you mean 'bash'?" in call("completion", "bahs").line
