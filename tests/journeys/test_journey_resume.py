"""Job 7: a run that was killed, and one that Ctrl-C stopped, end with the weights of one that ran through."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import ENVIRONMENT, call
from safetensors.torch import load_file

PROGRAM = str(Path(sys.executable).with_name("drivetrain"))
TRAIN = ["train", "mine.yaml", "epochs=20", "--every-steps", "1"]


def stopped(process: subprocess.Popen[str], out: str, number: int) -> None:
    """Send a signal once there are checkpoints."""
    deadline = time.monotonic() + 120
    while len(list(Path(out).glob("checkpoints/step-*/state.json"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, number)


@pytest.mark.process
@pytest.mark.long
def test_a_killed_and_an_interrupted_run_continue(started: list[subprocess.Popen[str]]) -> None:
    ways = {"runs/killed": signal.SIGKILL, "runs/interrupted": signal.SIGINT}
    for out in ways:
        started.append(
            subprocess.Popen(
                [PROGRAM, *TRAIN, "--out", out], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True, env=ENVIRONMENT,
            )
        )  # fmt: skip
    for process, (out, number) in zip(started, ways.items(), strict=True):
        stopped(process, out, number)
    printed = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [-signal.SIGKILL, 130]
    assert "--resume" in printed[1]
    assert call(*TRAIN, "--out", "runs/through").code == 0
    expected = load_file("runs/through/model.safetensors")
    for out in ways:
        end = call(*TRAIN, "--out", out, "--resume")
        assert end.code == 0, end
        found = load_file(f"{out}/model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in expected.items()), out
    history = Path("runs/through/history.json").read_bytes()
    assert call(*TRAIN, "--out", "runs/through", "--resume").code == 0  # finished: nothing is trained again
    assert Path("runs/through/history.json").read_bytes() == history
