"""The shells' completion, by the shells."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import call
from drivetrain import RECIPES
from drivetrain.pipeline.apps.cli.app import COMMANDS

ASK = """\
source "$1"; shift
cd "$1"; shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_drivetrain
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash, next to some files."""
    path = tmp_path_factory.mktemp("completion") / "drivetrain.bash"
    end = call("completion", "bash")
    assert end.code == 0, end.err
    path.write_text(end.out)
    (path.parent / "a run").mkdir()
    (path.parent / "mine.yaml").touch()
    return path


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words after `drivetrain`."""
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "ask", str(script), str(script.parent), "drivetrain", *words],
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return {*done.stdout.splitlines()} - {""}


FILES = {"a run", "drivetrain.bash", "mine.yaml"}


def test_bash_completes_commands_options_recipes_and_files(script: Path) -> None:
    def offered(*words: str) -> set[str]:
        return completed(script, *words)

    assert offered("") == {*COMMANDS, "--help", "--version"}
    assert offered("in") == {"inspect"}
    assert offered("train", "cifar10-q") == {"cifar10-quickstart"}
    assert offered("train", "mi") == {"mine.yaml"}
    assert offered("train", "") == {*RECIPES, *FILES}
    assert offered("train", "--le") == {"--ledger", "--ledger-seconds"}
    assert offered("train", "baseline", "batch_") == {"batch_size="}
    assert offered("train", "baseline", "epochs", "=", "3", "see") == {"seed="}
    assert offered("train", "--out", "") == FILES
    assert offered("train", "--out", "a") == {"a run"}
    assert offered("train", "--out", "x", "cifar10-q") == {"cifar10-quickstart"}
    assert offered("train", "baseline", "train", "=") == FILES
    assert offered("train", "baseline", "train", "=", "mi") == {"mine.yaml"}
    assert offered("train", "baseline", "epochs", "=") == set()
    assert offered("train", "baseline", "--ledger", "seed") == {"seed="}
    assert offered("train", "--logger", "") == {"csv", "tensorboard"}
    assert offered("train", "--ledger-seconds", "") == set()
    assert offered("ledger", "--compare", "x", "mi") == {"mine.yaml"}
    assert offered("export", "a run", "x", "--format", "") == {"safetensors", "torch-export", "onnx"}
    assert offered("export", "a run", "x", "--format", "=", "to") == {"torch-export"}
    assert offered("recipes", "cifar10-q") == {"cifar10-quickstart"}
    assert offered("predict", "a run", "x.jpg", "mi") == {"mine.yaml"}
    assert offered("job", "") == {"slurm", "kubernetes", "ray", "skypilot"}
    assert offered("job", "slurm", "cifar10-q") == {"cifar10-quickstart"}
    assert offered("job", "slurm", "mine.yaml", "--nodes", "1", "see") == {"seed="}
    assert offered("completion", "") == {"bash", "zsh", "fish"}
    assert offered("doctor", "") == set()
    assert offered("nonsense", "") == set()


def test_every_option_is_offered(script: Path) -> None:
    for command in COMMANDS:
        shown = {word for word in call(command, "--help").out.split() if word.startswith("--")}
        assert completed(script, command, "--") <= {word.rstrip(",") for word in shown} | {"--help"}
        assert {"--help", "--version"} - completed(script, command, "--") == {"--version"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_loads_and_completes(tmp_path: Path) -> None:
    path = tmp_path / "drivetrain.zsh"
    path.write_text(call("completion", "zsh").out)
    ask = (  # as bashcompinit calls it
        f"autoload -U compinit; compinit -u -D; source {shlex.quote(str(path))}; setopt ksharrays shwordsplit; "
        'COMP_WORDS=(drivetrain train cifar10-q); COMP_CWORD=2; _drivetrain; print -l "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["zsh", "-f", "-c", ask], capture_output=True, text=True, timeout=20, check=True)
    assert "cifar10-quickstart" in done.stdout.split()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(tmp_path: Path) -> None:
    path = tmp_path / "drivetrain.fish"
    path.write_text(call("completion", "fish").out)
    for line, word in (
        ("drivetrain tr", "train"),
        ("drivetrain train cifar10-q", "cifar10-quickstart"),
        ("drivetrain export a b --format to", "torch-export"),
        ("drivetrain train --ou", "--out"),
    ):
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {shlex.quote(str(path))}; complete -C {shlex.quote(line)}"],
            capture_output=True, text=True, timeout=20, check=True, cwd=tmp_path,
        )  # fmt: skip
        assert word in {offer.partition("\t")[0] for offer in done.stdout.splitlines()}


def test_the_script_of_fish_has_every_option_and_closes_its_quotes() -> None:
    text = call("completion", "fish").out
    for line in text.splitlines():
        shlex.split(line.replace("\\'", ""))  # raises for an open quote
    for command in COMMANDS:
        assert f"-a {command} -d " in text
    assert "\"__fish_seen_subcommand_from export\" -l format -r -f -a 'safetensors torch-export onnx'" in text
    assert '"__fish_seen_subcommand_from train" -l resume -d ' in text


def test_another_shell_is_refused() -> None:
    assert "no completion for the shell 'bahs'. Did you mean 'bash'?" in call("completion", "bahs").line
