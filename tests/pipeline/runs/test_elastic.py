"""A job of two machines goes down to one and up again, without an influence on what it learns."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from agents import SAMPLES, Job, recipe
from drivetrain import Pipeline
from pipeline_data import Toy
from process_state import wait_until_ended

pytestmark = [pytest.mark.process, pytest.mark.slow]
EPOCHS, STEPS = 8, 4
Started = list[subprocess.Popen[str]]


def losses(out: Path) -> list[float]:
    epochs = json.loads((out / "history.json").read_text())["epochs"]
    return [value for epoch in epochs for value in (epoch["loss"], epoch["val_loss"])]


@pytest.mark.timeout(290)
def test_down_to_one_and_up_again(toy: Toy, tmp_path: Path, started: Started) -> None:
    """A machine is killed, comes back, and is sent away by a signal, as spot instances are."""
    job = Job(tmp_path, started, nodes="1:2", restarts=9, grows=True)
    command = ["train", recipe(toy, tmp_path / "toy.json", epochs=EPOCHS), "--out", str(job.out), "--every-steps", "1",
               "--resume"]  # fmt: skip
    job.slow.touch()
    first, second = job.start(*command), job.start(*command)
    job.wait(lambda: job.steps() >= 6, "training on two")
    worker = second.worker()
    second.process.kill()
    assert not wait_until_ended([worker], 10), "its worker outlives it"
    job.wait(lambda: [ranks for ranks, _ in job.starts()] == [2, 1], "training on one")
    third = job.start(*command)
    job.wait(lambda: [ranks for ranks, _ in job.starts()] == [2, 1, 2], "training on two again")
    job.slow.unlink()
    job.wait(lambda: len(job.starts()[-1][1]) > 2, "some steps")
    third.process.terminate()
    assert (third.end(), first.end()) == (1, 0), first.output
    assert [ranks for ranks, _ in job.starts()] == [2, 1, 2, 1]
    last = [max(steps) for _, steps in job.starts()]
    begun = [min(steps) for _, steps in job.starts()]
    # A step computes while the checkpoint of the one before is written; a kill may lose both.
    assert last[0] - 1 <= begun[1] <= last[0] + 1, "a kill loses at most two steps"
    assert begun[2:] == [last[1] + 1, last[2] + 1], "a machine that joins or is warned loses none"
    epochs = job.epochs(STEPS)
    assert len(epochs) == EPOCHS
    assert all(len(set(epoch)) == SAMPLES and epoch == epochs[0] for epoch in epochs)
    undisturbed = Pipeline.from_recipe(str(tmp_path / "toy.json"), devices=1, strategy="single")
    undisturbed.fit(out=tmp_path / "undisturbed", progress=False)
    assert losses(job.out) == pytest.approx(losses(tmp_path / "undisturbed"), rel=0, abs=1e-6)
