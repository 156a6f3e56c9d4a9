"""`launch` in scripts: no main guard, Ctrl-C, a killed parent, torchrun."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from process_state import wait_until_ended

pytestmark = pytest.mark.process

HEAD = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
import torch, torch.distributed as dist
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import launch

def say(text):
    os.write(1, (text + "\\n").encode())  # one write, so that two ranks' lines do not mix
"""


class Script:
    """A running script, its own temporary directory, and the ranks it starts."""

    def __init__(self, directory: Path, body: str, command: tuple[str, ...] = ()) -> None:
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        path = directory / "script.py"
        path.write_text(HEAD + body)
        self.process = subprocess.Popen(
            [sys.executable, *command, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=directory,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )
        self.ranks: list[psutil.Process] = []

    def wait_until_said(self, line: str, times: int) -> None:
        """Read output until `line` has come `times` times, then record the ranks."""
        assert self.process.stdout is not None
        seen: list[str] = []
        while seen.count(line) < times:
            seen.append(self.process.stdout.readline().rstrip("\n"))
            assert seen[-1] or self.process.poll() is None, "\n".join(seen)
        self.ranks = psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, seconds: float) -> str:
        """The rest of the output; fails if the script, a rank or a file of theirs is there after `seconds`."""
        deadline = time.monotonic() + seconds
        output, _ = self.process.communicate(timeout=seconds)
        assert not wait_until_ended(self.ranks, deadline - time.monotonic())
        left = [path.name for path in self.temporary.iterdir()]
        assert all(name.startswith("torchelastic") for name in left), left
        return output


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Script] | object]:
    scripts: list[Script] = []

    def run(body: str, *command: str) -> Script:
        scripts.append(Script(tmp_path, body, command))
        return scripts[-1]

    yield run
    for script in scripts:
        for process in [*script.ranks, script.process]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        script.process.communicate()


@pytest.mark.slow
def test_a_script_without_main_guard(start) -> None:
    script = start("""
class Result:
    def __init__(self, rank):
        self.rank = rank

say("top level")
results = launch(lambda n: Result(n * dist.get_rank()), 10, devices=2, timeout=60)
say(f"{[r.rank for r in results]} {all(type(r) is Result for r in results)}")
""")
    output = script.finish(60)
    assert script.process.returncode == 0, output
    assert output.splitlines() == ["top level", "[0, 10] True"]


@pytest.mark.slow
def test_ctrl_c_keeps_what_rank_0_had_finished(start) -> None:
    script = start("""
class Interrupted(KeyboardInterrupt):
    def __init__(self, result):
        super().__init__("interrupted")
        self.result = result

def train():
    steps = 0
    try:
        while True:
            dist.all_reduce(torch.ones(1))
            steps += 1
            if steps == 3:
                say("ready")
            time.sleep(0.01)
    except KeyboardInterrupt:
        raise Interrupted((dist.get_rank(), steps, torch.ones(5_000_000)))

try:
    launch(train, devices=2)
except Interrupted as error:
    rank, steps, weights = error.result
    say(f"kept rank {rank}, steps done: {steps > 2}, weights {weights.sum():.0f}")
""")
    script.wait_until_said("ready", times=2)
    assert len(script.ranks) == 2
    script.process.send_signal(signal.SIGINT)
    output = script.finish(15)
    assert output.splitlines() == ["kept rank 0, steps done: True, weights 5000000"]
    assert script.process.returncode == 0


@pytest.mark.slow  # with forked ranks, which must end as well, in test_launch.py
def test_ctrl_c_ends_a_script_whose_ranks_do_not_listen(start) -> None:
    script = start("""
def train():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dist.barrier()
    say("ready")
    if dist.get_rank():
        dist.all_reduce(torch.ones(1))
    time.sleep(600)

launch(train, devices=2, patience=0.5)
""")
    script.wait_until_said("ready", times=2)
    script.process.send_signal(signal.SIGINT)
    output = script.finish(15)
    assert output.splitlines()[-1] == "KeyboardInterrupt"
    assert script.process.returncode == -signal.SIGINT


def test_ranks_do_not_outlive_a_killed_parent(start) -> None:
    """Nor does what they started, nor the directory in which they met."""
    script = start("""
import subprocess

def train():
    subprocess.Popen(["sleep", "600"])
    dist.barrier()
    say("ready")
    if dist.get_rank():
        dist.all_reduce(torch.ones(1))
    time.sleep(600)

launch(train, devices=2)
""")
    script.wait_until_said("ready", times=2)
    assert len(script.ranks) == 4
    assert len(list(script.temporary.iterdir())) == 1
    script.process.kill()
    script.finish(15)


@pytest.mark.slow
def test_torchrun_joins(start) -> None:
    script = start(
        """
from drivetrain import strategies

def train():
    engine = strategies.get("ddp", device="cpu").prepare(
        torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    return os.getpid(), engine.world_size, float(engine.reduce(torch.tensor(float(engine.rank))))

(pid, size, mean), = launch(train, devices=2)
assert not dist.is_initialized()
try:
    launch(train, devices=3)
except StrategyError as error:
    say(f"{pid == os.getpid()} {size} {mean} {'devices=2' in str(error)}")
""",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        "--master-port=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
    )
    output = script.finish(90)
    assert script.process.returncode == 0, output
    assert output.splitlines().count("True 2 0.5 True") == 2, output
