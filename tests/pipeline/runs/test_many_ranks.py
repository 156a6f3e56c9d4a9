"""A cluster of 64 ranks on this machine, eight agents of torchrun with eight ranks each, loses eight and gets others.

What is learned is that of one process."""

import subprocess
from itertools import chain
from pathlib import Path

import pytest
from agents import Job, losses_in, recipe
from drivetrain import Pipeline
from pipeline_data import Toy, write_toy
from process_state import wait_until_ended

MACHINES, RANKS = 8, 8
BATCH, STEPS, EPOCHS = 448, 2, 8  # 56 and 64 divide the batch
PATIENCE = 600.0  # seconds for 64 processes to import torch, two at a time


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(2400)
def test_64_ranks_lose_eight_and_get_eight(
    toy: Toy, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    job = Job(tmp_path, started, nodes=f"{MACHINES - 1}:{MACHINES}", restarts=9, grows=True, ranks=RANKS)
    train = write_toy(tmp_path / "train.beton", BATCH * STEPS, seed=1)
    path = recipe(toy, tmp_path / "toy.json", epochs=EPOCHS, train=str(train), batch_size=BATCH, timeout=300)
    command = ["train", path, "--out", str(job.out), "--every-steps", "1", "--resume", "--quiet"]
    job.slow.touch()
    for _ in range(MACHINES):
        job.start(*command)
    job.wait(lambda: job.steps() >= 3, "training on 64", PATIENCE)
    *others, lost = job.agents
    workers = lost.workers()
    assert len(workers) == RANKS
    lost.process.kill()
    assert not wait_until_ended(workers, 30), "its workers outlive it"
    job.wait(lambda: [ranks for ranks, _ in job.starts()] == [64, 56], "training on 56", PATIENCE)
    last = job.start(*command)
    job.wait(lambda: [ranks for ranks, _ in job.starts()] == [64, 56, 64], "training on 64 again", PATIENCE)
    job.slow.unlink()
    assert [agent.end(PATIENCE) for agent in (*others, last)] == [0] * MACHINES
    for _, steps in job.starts():
        for step, ranks in steps.items():
            crcs = [*chain(*ranks)]
            assert len(set(crcs)) == len(crcs), f"step {step} has a sample twice"
    epochs = job.epochs(STEPS)
    assert len(epochs) == EPOCHS
    assert all(len(set(epoch)) == BATCH * STEPS and epoch == epochs[0] for epoch in epochs)
    undisturbed = Pipeline.from_recipe(path, devices=1, strategy="single")
    undisturbed.fit(out=tmp_path / "undisturbed", progress=False)
    assert losses_in(job.out) == pytest.approx(losses_in(tmp_path / "undisturbed"), rel=0, abs=1e-5)
