"""Under torchrun's variables: a rank that dies, stops or fails is named by the error of the one that is left."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from process_state import start_ranks, wait_until, wait_until_ended

pytestmark = pytest.mark.process

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from drivetrain.common.errors import DataError
from drivetrain.strategies import launch
from drivetrain.strategies.launching import meeting

if sys.argv[1] == "dies":  # a process that is gone beats no later; the other cases have the seconds of users
    meeting.BEAT, meeting._MISSED = 0.2, 1.0

def train(how):
    for step in range(1000):
        dist.all_reduce(torch.ones(1))
        if step == 5 and dist.get_rank() == (how != "stops with the store"):
            if how == "fails":
                raise DataError("no such picture")
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        time.sleep(0.05)

try:
    launch(train, sys.argv[1], devices=2, device="cpu", collective_timeout=4)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    os._exit(3)
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dies", "does not answer"),
        pytest.param("stops", "does not answer", marks=pytest.mark.slow),
        pytest.param("fails", "failed: DataError: no such picture", marks=pytest.mark.slow),
    ],
)
def test_the_other_rank_names_it(tmp_path: Path, started: list[subprocess.Popen[str]], how: str, said: str) -> None:
    start_ranks(started, tmp_path, SCRIPT, how)
    output, _ = started[0].communicate(timeout=120)
    assert started[0].returncode == 3
    host = socket.gethostname()
    assert output.startswith(f"LostRankError Rank 0 of 2 ({host}) stops, because "), output
    assert f"rank 1 ({host}, process {started[1].pid}) {said}" in output


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_store_that_is_silent(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    """Rank 0 hosts it here. Its connections stay open, as when a cable is cut."""
    start_ranks(started, tmp_path, SCRIPT, "stops with the store")
    output, _ = started[1].communicate(timeout=120)
    assert started[1].returncode == 3
    said = "stops, because the host of rank 0 does not answer at 127.0.0.1:"
    assert output.startswith(f"LostRankError Rank 1 of 2 ({socket.gethostname()}) {said}"), output


AGENT = """
import os, sys, time
import torch.distributed as dist
from drivetrain.strategies import launch

def train(place):
    open(place, "w").write(str(os.getpid()))
    time.sleep(100)

launch(train, sys.argv[1], devices=1, device="cpu")
"""


@pytest.mark.slow
def test_no_worker_outlives_its_agent(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    script, place = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(AGENT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--rdzv-backend=c10d",
               "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(script), str(place)]  # fmt: skip
    agent = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started.append(agent)
    wait_until(lambda: place.exists() and place.read_text(), agent, seconds=90)
    worker = psutil.Process(int(place.read_text()))
    agent.kill()
    agent.wait()
    assert not wait_until_ended([worker], 5)
