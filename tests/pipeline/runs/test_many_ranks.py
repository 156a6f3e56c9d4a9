"""A cluster of 64 ranks on this machine loses eight, continues without them, and gets eight again.

The ranks are forked from one process, and share the memory of their libraries: as many processes of torchrun would take
20 GB. That torchrun's ranks come and go is tested on two machines.
"""

import os
import signal
from pathlib import Path

import pytest
from agents import losses_in
from cluster_jobs import Signals
from drivetrain import Callback, Pipeline, RunView, StrategyError
from drivetrain.pipeline import Checkpoints, TrainingPreempted
from drivetrain.strategies import launch
from drivetrain.strategies.launching import launcher
from forked_ranks import RankServer
from pipeline_data import Toy, write_toy

BATCH, STEPS, EPOCHS = 448, 2, 6  # 56 and 64 divide the batch


class Lost(Callback):
    """Kills the ranks from `first` on after step `step`, as by a machine that loses its power."""

    def __init__(self, step: int, first: int) -> None:
        self.step, self.first = step, first

    def on_step_end(self, view: RunView) -> None:
        if view.step == self.step and view.rank >= self.first:
            os.kill(os.getpid(), signal.SIGKILL)


def train(pipeline: Pipeline, out: Path, *callbacks: Callback) -> str:
    """On each rank: resume, train, and say how it ended."""
    try:
        pipeline.fit(
            epochs=EPOCHS, out=out, resume="auto", checkpoints=Checkpoints(every_steps=1), stop_on=["SIGUSR1"],
            callbacks=callbacks, progress=False,
        )  # fmt: skip
    except TrainingPreempted as stopped:
        return f"stopped at {Path(str(stopped.checkpoint)).name}"
    return "finished"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1200)
def test_64_ranks_lose_eight_and_get_eight(
    toy: Toy, tmp_path: Path, rank_server: RankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "start_interpreter", rank_server.start)
    data = write_toy(tmp_path / "train.beton", BATCH * STEPS, seed=1)
    val = write_toy(tmp_path / "val.beton", 100, seed=2)
    pipeline = toy.pipeline().load(data, val, batch_size=BATCH, image_size=16, flip=False, workers=1)
    ranks, out = pipeline.distribute("ddp", devices="auto", device="cpu", timeout=300), tmp_path / "run"

    def cluster(devices: int, *callbacks: Callback) -> set[str]:
        return {*launch(train, ranks, out, *callbacks, devices=devices, device="cpu", timeout=300)}

    with pytest.raises(StrategyError, match=r"[Rr]ank (5[6-9]|6[0-3])\b"):
        cluster(64, Lost(5, 56))
    assert cluster(56, Signals(8)) == {"stopped at step-00000009"}
    assert cluster(64) == {"finished"}
    pipeline.fit(epochs=EPOCHS, out=tmp_path / "alone", progress=False)
    assert losses_in(out) == pytest.approx(losses_in(tmp_path / "alone"), rel=0, abs=1e-5)
