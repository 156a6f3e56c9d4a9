"""`make test-all` continues where it was stopped, and reports; with real processes, in a small repository."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from places import ROOT
from process_state import wait_until, wait_until_ended

pytestmark = [pytest.mark.process, pytest.mark.long]
slow = pytest.mark.slow  # each call is up to six processes of pytest

SETTINGS = """
[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["tests/support"]
markers = ["slow: s", "gpu: g", "alone: a"]
"""
CONFTEST = """
import outcomes
forked = []

def pytest_configure(config):
    outcomes.register(config, lambda: len(forked))
"""
RANKS = """
import os
import conftest
from test_it import note

def test_ranks():
    conftest.forked.append(1)
    note("ranks " + os.environ["DRIVETRAIN_RANKS"])
"""
TESTS = """
import os, pathlib, time
import conftest
import pytest

def note(text):
    with open("../ran", "a") as file:
        file.write(text + "\\n")

def test_quick():
    note("quick")

@pytest.mark.parametrize("a", ["x y", "é::"])
def test_odd_names(a):
    note(a)

@pytest.mark.slow
def test_slow():
    conftest.forked.append(1)  # its file has no sample: this one starts ranks
    note("slow " + os.environ["DRIVETRAIN_RANKS"])

@pytest.mark.alone
def test_may_hold():
    note("held")
    while os.path.exists("../hold"):
        time.sleep(0.05)

@pytest.mark.alone
@pytest.mark.slow
def test_may_fail():
    note("may fail")
    assert not os.path.exists("../fail"), "it was meant to"

@pytest.mark.alone
@pytest.mark.slow
def test_may_end_the_process():
    note("may end")
    if os.path.exists("../end"):
        os._exit(9)

@pytest.mark.skip(reason="no such machine")
def test_skipped():
    note("skipped")

@pytest.mark.gpu
def test_of_a_gpu():
    note("gpu")
"""


class Repository:
    """A repository with the runner and a file of tests, which write to `ran` what runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "repository"
        (self.root / ".ci").mkdir(parents=True)
        (self.root / "tests/support").mkdir(parents=True)
        shutil.copy(ROOT / ".ci/test_all.py", self.root / ".ci")
        shutil.copy(ROOT / "tests/support/outcomes.py", self.root / "tests/support")
        (self.root / "pyproject.toml").write_text(SETTINGS)
        (self.root / "tests/conftest.py").write_text(CONFTEST)
        (self.root / "tests/test_it.py").write_text(TESTS)
        (self.root / "tests/test_of_ranks.py").write_text(RANKS)
        (self.root / ".gitignore").write_text(".build/\n__pycache__/\n.pytest_cache/\n")
        subprocess.run(["git", "init", "-q", self.root], check=True)

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, ".ci/test_all.py", *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.root, env=environment, **pipes)

    def call(self, *options: str) -> tuple[int, str]:
        process = self.start(*options)
        output, _ = process.communicate(timeout=100)
        return process.returncode, output

    def ran(self) -> list[str]:
        """What ran since the last call of this."""
        file = self.folder / "ran"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return sorted(lines)

    def wait_for(self, text: str) -> None:
        file = self.folder / "ran"
        wait_until(lambda: file.exists() and text in file.read_text())


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


ALL = ["held", "may end", "may fail", "quick", "ranks ", "ranks started", "slow started", "x y", "é::"]


@slow
def test_everything_runs_once_and_a_change_makes_it_run_again(repository: Repository) -> None:
    (repository.folder / "fail").touch()
    status, output = repository.call()
    assert status == 1
    assert "test_may_fail (slow, alone): AssertionError: it was meant to" in output
    assert "1 no such machine" in output
    last = output.splitlines()[-1]
    assert last.startswith("test-all: 8 passed, 1 skipped, 1 failed, 0 never ran, in 0 min")
    assert repository.ran() == ALL

    (repository.folder / "fail").unlink()
    status, output = repository.call()
    assert (status, repository.ran()) == (0, ["may fail"])
    assert "test-all: 9 passed, 1 skipped, 0 failed, 0 never ran" in output
    status, output = repository.call()
    assert (status, repository.ran()) == (0, [])

    (repository.root / "notes.md").touch()  # a new file is a change, too
    status, output = repository.call("--keep")
    assert (status, repository.ran()) == (0, [])
    assert "10 outcomes are of other files" in output
    (repository.root / "notes.md").write_text("more")
    assert repository.call()[0] == 0
    assert repository.ran() == ALL


@slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL], ids=lambda stop: stop.name)
def test_it_continues_where_it_was_stopped(repository: Repository, stop: signal.Signals) -> None:
    (repository.folder / "hold").touch()
    process = repository.start()
    repository.wait_for("held")
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(stop)
    output, _ = process.communicate(timeout=60)
    assert not wait_until_ended(family, 30)
    assert repository.ran() == sorted(["quick", "ranks ", "x y", "é::", "held"])
    if stop is signal.SIGINT:
        assert process.returncode == 130
        assert "5 never ran" in output  # the sample included
        assert "test_may_hold (alone)" in output
    with next((repository.root / ".build/test-all").glob("*.jsonl")).open("a") as file:
        file.write('{"phase": "def')  # as if it had been killed while it wrote
    (repository.folder / "hold").unlink()
    assert repository.call()[0] == 0
    assert repository.ran() == sorted(["held", "may fail", "may end", "slow started", "ranks started"])


@slow
def test_a_test_that_ends_the_process_has_failed_and_the_others_run(repository: Repository) -> None:
    (repository.folder / "end").touch()
    status, output = repository.call()
    assert status == 1
    assert "test_may_end_the_process (slow, alone): pytest ended with status 9 in this test" in output
    assert "test-all: 8 passed, 1 skipped, 1 failed, 0 never ran" in output


def test_a_file_that_cannot_be_imported_ends_it_with_the_reason(repository: Repository) -> None:
    (repository.root / "tests/test_broken.py").write_text("import no_such_module\n")
    status, output = repository.call()
    assert status != 0
    assert "no_such_module" in output
    assert not repository.ran()


@slow
def test_a_change_meanwhile_is_reported(repository: Repository) -> None:
    (repository.folder / "hold").touch()
    process = repository.start()
    repository.wait_for("held")
    (repository.root / "notes.md").touch()
    (repository.folder / "hold").unlink()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "changed meanwhile" in output
