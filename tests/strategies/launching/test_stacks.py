"""A rank hangs: the stacks of all ranks are in one file before the job ends, and at SIGQUIT."""

import faulthandler
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from drivetrain.common.errors import StrategyError
from drivetrain.common.signals import is_unhandled
from drivetrain.strategies import launch
from forked_ranks import STARTED
from process_state import start_ranks, wait_until
from strategy_jobs import hang_on_rank_1, save_until, work_until

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.usefixtures("forked")]
TIMEOUT = 8 if STARTED else 3
"""Seconds of a job that hangs, with those that a rank takes to start."""


@cache
def start_the_server() -> None:
    """Else a job's time would contain that in which the server of ranks starts."""
    launch(int, devices=1, device="cpu")


@pytest.mark.parametrize(
    ("how", "limits", "said", "rank_0"),
    [
        ("waits", {"collective_timeout": 3}, "raised RuntimeError", "dist.all_reduce(torch.ones(1))"),
        ("waits", {"timeout": TIMEOUT}, f"did not return within timeout={TIMEOUT} s", "in hang_on_rank_1"),
        ("aborts", {"timeout": 60}, "was killed by SIGABRT", "Fatal Python error: Aborted"),
    ],
    ids=["the others' time is up", "its own time is up", "another aborts"],
)
def test_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, limits: dict[str, float], said: str, rank_0: str
) -> None:
    place = tmp_path / "stacks.txt"
    start_the_server()
    # For the error of another rank, which none raises.
    monkeypatch.setattr("drivetrain.strategies.launching.launcher._ECHO_PATIENCE", 0.5)
    with pytest.raises(StrategyError) as caught:
        launch(hang_on_rank_1, how, devices=2, device="cpu", stacks=place, **limits)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert f"The stacks of all ranks are in {place}." in str(caught.value)
    head, first, second = re.split(r"^--- ", place.read_text(), flags=re.MULTILINE)
    assert head.startswith(f"=== {socket.gethostname()}, ")
    assert first.startswith("rank 0")
    assert rank_0 in first
    assert second.startswith("rank 1, process ")
    assert "in hang_here" in second
    assert is_unhandled(signal.SIGQUIT)


def test_without_a_place_the_file_is_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_the_server()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StrategyError, match=r"The stacks of all ranks are in (.*)\.") as caught:
        launch(hang_on_rank_1, "returns", devices=2, device="cpu", timeout=TIMEOUT)
    (path,) = tmp_path.iterdir()
    assert f"in {path}." in str(caught.value)
    assert "in hang_here" in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_sigquit_to_the_launching_process_and_to_a_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], before: signal.Handlers
) -> None:
    """A shell script that starts a process with `&` has SIGQUIT ignored in it."""
    signal.signal(signal.SIGQUIT, before)
    place, ends = tmp_path / "stacks.txt", tmp_path / "ends"
    texts: list[str] = []

    def ask() -> None:
        ranks = [ends.with_suffix(f".{rank}") for rank in (0, 1)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in ranks))
        os.kill(os.getpid(), signal.SIGQUIT)
        wait_until(lambda: place.exists() and place.read_text().count("in work_until") == 2)
        texts.append(place.read_text())
        os.kill(int(ranks[1].read_text()), signal.SIGQUIT)
        wait_until(lambda: place.read_text().count("in work_until") == 3)
        texts.append(place.read_text())
        ends.write_text("done")

    asking = threading.Thread(target=ask)
    asking.start()
    assert launch(work_until, ends, devices=2, device="cpu", timeout=60, stacks=place) == ["done", "done"]
    asking.join()
    assert [text.count("--- rank 0") for text in texts] == [1, 1]
    assert [text.count("--- rank 1") for text in texts] == [1, 2]
    assert capfd.readouterr().err.count(f"Stacks are in {place}") == 2
    assert signal.signal(signal.SIGQUIT, signal.SIG_DFL) is before


def test_sigquit_while_ranks_save_after_ctrl_c(tmp_path: Path) -> None:
    start_the_server()
    place, ends, never = tmp_path / "stacks.txt", tmp_path / "ends", tmp_path / "never"
    texts: list[str] = []

    def is_reached(file: Path) -> bool:
        ranks = [file.with_suffix(f".{rank}") for rank in (0, 1)]
        return all(each.exists() and each.read_text() for each in ranks)

    def ask() -> None:
        try:
            wait_until(lambda: is_reached(never))
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: is_reached(ends))
            os.kill(os.getpid(), signal.SIGQUIT)
            with suppress(AssertionError):
                wait_until(lambda: place.exists() and place.read_text().count("in save_until") == 2, seconds=5)
                texts.append(place.read_text())
        finally:
            never.write_text("over")
            ends.write_text("done")

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(KeyboardInterrupt):
        launch(save_until, ends, devices=2, device="cpu", saves=True, stacks=place)
    asking.join()
    assert [text.count("--- rank") for text in texts] == [2]


def test_a_handler_of_the_user_stays(tmp_path: Path) -> None:
    """Also one in C, which Python's `signal` module does not know of."""
    ends = tmp_path / "ends"
    ends.write_text("done")
    with (tmp_path / "own").open("w+") as file:
        faulthandler.register(signal.SIGQUIT, file=file)
        try:
            assert not is_unhandled(signal.SIGQUIT)
            launch(work_until, ends, devices=1, device="cpu", timeout=60)
            os.kill(os.getpid(), signal.SIGQUIT)
            assert "test_a_handler_of_the_user_stays" in (tmp_path / "own").read_text()
        finally:
            faulthandler.unregister(signal.SIGQUIT)


SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from pathlib import Path
from drivetrain.common.signals import is_unhandled
from drivetrain.strategies import launch

def hang_here():
    time.sleep(600)

def train():
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        hang_here()
    dist.all_reduce(torch.ones(1))

try:
    launch(train, devices=2, device="cpu", collective_timeout=4, stacks=Path(sys.argv[1]))
except Exception as error:
    print(is_unhandled(signal.SIGQUIT), type(error).__name__, error, flush=True)
    os._exit(3)
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_under_torchrun_ranks_send_their_stacks(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    place = tmp_path / "stacks.txt"
    start_ranks(started, tmp_path, SCRIPT, place)
    output, _ = started[0].communicate(timeout=120)
    assert output.startswith(f"True LostRankError Rank 0 of 2 ({socket.gethostname()}) stops, because no rank is")
    assert f"The stacks of all ranks are in {place} ({socket.gethostname()})" in output
    head, first, second = re.split(r"^--- ", place.read_text(), flags=re.MULTILINE)
    assert "no collective within 4 s" in head
    assert first.startswith(f"rank 0 ({socket.gethostname()}, process {started[0].pid})")
    assert "in train" in first
    assert "all_reduce" in first
    assert second.startswith(f"rank 1 ({socket.gethostname()}, process {started[1].pid})")
    assert "in hang_here" in second
    os.kill(started[1].pid, signal.SIGQUIT)
    wait_until(lambda: place.read_text().count("in hang_here") == 2)
    assert started[1].poll() is None
