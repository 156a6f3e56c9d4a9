"""Job 7: a run that was killed, and one that Ctrl-C stopped, end with the weights of one that ran through."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import ENVIRONMENT, done
from safetensors.torch import load_file

PROGRAM = str(Path(sys.executable).with_name("drivetrain"))
TRAIN = ["train", "mine.yaml", "epochs=10", "--every-steps", "1"]
WAYS = {"runs/killed": signal.SIGKILL, "runs/interrupted": signal.SIGINT}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_killed_and_an_interrupted_run_continue(started: list[subprocess.Popen[str]]) -> None:
    for out in WAYS:
        command, environment = [PROGRAM, *TRAIN, "--out", out], ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, **pipes, start_new_session=True, env=environment))
    waiting = dict(zip(WAYS, started, strict=True))
    while waiting:
        time.sleep(0.01)
        for out, process in [*waiting.items()]:
            assert process.poll() is None, process.communicate()
            if len(list(Path(out).glob("checkpoints/step-*/state.json"))) > 1:
                os.killpg(waiting.pop(out).pid, WAYS[out])
    printed = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [-signal.SIGKILL, 130]
    assert "--resume" in printed[1]
    done(*TRAIN, "--out", "runs/through")
    expected = load_file("runs/through/model.safetensors")
    for out in WAYS:
        done(*TRAIN, "--out", out, "--resume")
        found = load_file(f"{out}/model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in expected.items()), out
    assert "the training was finished" in done(*TRAIN, "--out", "runs/through", "--resume")
