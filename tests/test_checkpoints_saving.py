"""Which checkpoints stay, and what becomes of one that cannot be written."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import CheckpointError, Pipeline
from drivetrain.pipeline import Checkpoints, TrainingInterrupted
from drivetrain.pipeline.retention import Store
from drivetrain.pipeline.snapshot import shares
from drivetrain.strategies import launch
from pipeline_data import BATCH, TRAIN, Sleepy, Toy, batch_norm_model, numbers, plain_model

STEPS = TRAIN // BATCH


def fit(pipeline: Pipeline, epochs: int = 4, **arguments: Any) -> Any:
    return pipeline.fit(epochs=epochs, progress=False, **arguments)


def steps_in(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def test_the_last_and_the_best_stay(toy: Toy, tmp_path: Path) -> None:
    """The best is the first of the highest accuracy; steps in the middle of an epoch have none."""
    pipeline = toy.pipeline(batch_norm_model)
    result = fit(pipeline, 6, out=tmp_path / "both", checkpoints=Checkpoints(every_steps=3, keep=2))
    accuracies = [epoch.accuracy for epoch in result.history.epochs]
    best = (accuracies.index(max(accuracies)) + 1) * STEPS
    assert best < 5 * STEPS  # else the last ones would be it
    assert steps_in(tmp_path / "both") == sorted({best, 6 * STEPS - 3, 6 * STEPS})
    fit(pipeline, 6, out=tmp_path / "last", checkpoints=Checkpoints(keep=1, keep_best=False))
    assert steps_in(tmp_path / "last") == [6 * STEPS]
    assert sorted(path.name for path in (tmp_path / "last" / "checkpoints").iterdir()) == [
        "run.json",
        "step-00000024",
    ]


def test_a_run_that_starts_anew_keeps_the_earlier_one_until_it_has_its_own(toy: Toy, tmp_path: Path) -> None:
    """And `auto` never takes the earlier run's for its own."""
    pipeline = toy.pipeline(batch_norm_model)
    fit(pipeline, out=tmp_path)
    before = steps_in(tmp_path)

    class Stops(Sleepy):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if self.training and len(images) == BATCH:
                raise KeyboardInterrupt
            return super().forward(images)

    with pytest.raises(TrainingInterrupted):
        fit(pipeline._with(model=lambda: Stops(0), seed=1), out=tmp_path)
    assert steps_in(tmp_path) == before
    resumed = fit(pipeline._with(seed=1), out=tmp_path, resume="auto")  # from the start: it had none
    assert "resumed" not in resumed.history.facts
    assert numbers(resumed) == numbers(fit(pipeline._with(seed=1)))
    assert steps_in(tmp_path)[-1] == 4 * STEPS


def test_going_back_to_an_older_one_leaves_the_newer_behind(toy: Toy, tmp_path: Path) -> None:
    """`auto` then goes on from where the run went back to, although there are checkpoints of more steps."""
    pipeline, how = toy.pipeline(batch_norm_model), Checkpoints(keep=10)
    whole = fit(pipeline, out=tmp_path, checkpoints=how)
    older = tmp_path / "checkpoints" / "step-00000008"
    run = json.loads((older / "state.json").read_text())["run"]
    Store(tmp_path.resolve() / "checkpoints").begin("another", older)  # what resume=older does at first
    resumed = fit(pipeline, out=tmp_path, resume="auto", checkpoints=how)
    assert resumed.history.facts["resumed"][0]["step"] == 8
    assert numbers(resumed) == numbers(whole)
    states = [
        json.loads((path / "state.json").read_text()) for path in (tmp_path / "checkpoints").glob("step-*")
    ]
    assert {state["run"] for state in states}.isdisjoint({run})
    assert steps_in(tmp_path) == [12, 16]


def test_a_failure_in_the_background_is_raised(toy: Toy, tmp_path: Path, monkeypatch: Any) -> None:
    """At the next checkpoint, or at the end; not lost, and not twice."""
    for background in (True, False):
        out = tmp_path / str(background)
        (out / "checkpoints" / "step-00000004").mkdir(parents=True)
        # Renaming over a folder that cannot be removed: its place is taken by a file that is in use as a folder.
        blocked = out / "checkpoints" / ".step-00000004.removed"
        blocked.write_text("")
        with pytest.raises(CheckpointError, match=r"step-00000004 could not be written: .*Not a directory"):
            fit(toy.pipeline(plain_model), 1, out=out, checkpoints=Checkpoints(background=background))
    monkeypatch.setattr(Store, "prune", lambda *_: 1 / 0)  # a mistake of our own is not lost either
    with pytest.raises(CheckpointError, match="division by zero"):
        fit(toy.pipeline(plain_model), 2, out=tmp_path / "mistake")
    assert not [t for t in threading.enumerate() if t.name == "drivetrain-checkpoint"]


def test_training_goes_on_while_it_is_written(toy: Toy, tmp_path: Path, monkeypatch: Any) -> None:
    """The values are those of the moment; the thread writes them when steps have moved on."""
    from drivetrain.pipeline import saving

    moved, original = threading.Event(), saving.write_part
    count = 0

    def late(*arguments: Any) -> None:
        assert moved.wait(30)
        original(*arguments)

    class Counting(Sleepy):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += self.training
            if count == 4 + 1:  # the check of the output, and steps 1 to 4: one after the checkpoint at 3
                moved.set()
            return super().forward(images)

    monkeypatch.setattr(saving, "write_part", late)
    whole = fit(
        toy.pipeline(lambda: Counting(0)), 1, out=tmp_path, checkpoints=Checkpoints(every_steps=3, keep=5)
    )
    monkeypatch.undo()
    resumed = fit(toy.pipeline(lambda: Sleepy(0)), 1, resume=tmp_path / "checkpoints" / "step-00000003")
    assert numbers(resumed) == numbers(whole)


def on_two_ranks(pipeline: Pipeline, out: Path) -> str:
    rank = torch.distributed.get_rank()
    from drivetrain.pipeline import saving

    original = saving.write_part

    def failing(folder: Path, *arguments: Any) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        original(folder, *arguments)

    saving.write_part = failing
    try:
        fit(pipeline, 2, out=out)
    except CheckpointError as error:
        return str(error)
    finally:
        saving.write_part = original
    return ""


def test_one_ranks_failure_is_every_ranks(toy: Toy, tmp_path: Path) -> None:
    """Rank 0 does not wait for files that will not come; and Ctrl-C afterwards finds no thread."""
    pipeline = toy.pipeline(plain_model).distribute("fsdp", devices=2)
    first, second = launch(on_two_ranks, pipeline, tmp_path, devices=2, timeout=60)
    assert "1 other rank(s) could not write a checkpoint" in first
    assert "No space left on device" in second
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_after_ctrl_c_the_run_goes_on(toy: Toy, tmp_path: Path) -> None:
    class Stops(Sleepy):
        count = 0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            type(self).count += self.training
            if type(self).count == 8:
                raise KeyboardInterrupt
            return super().forward(images)

    how = Checkpoints(every_steps=2)
    with pytest.raises(TrainingInterrupted) as caught:
        fit(toy.pipeline(lambda: Stops(0)), out=tmp_path, checkpoints=how)
    assert caught.value.result is not None
    assert len(caught.value.result.history.epochs) == 1
    resumed = fit(toy.pipeline(lambda: Sleepy(0)), out=tmp_path, checkpoints=how, resume="auto")
    assert resumed.history.facts["resumed"][0]["step"] in (4, 6)
    assert numbers(resumed) == numbers(fit(toy.pipeline(lambda: Sleepy(0))))
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_shares_are_even_and_the_same_everywhere() -> None:
    sizes = {f"layer{number}": size for number, size in enumerate([100, 1, 1, 50, 49, 30, 20, 10, 5, 4])}
    homes = shares(sizes, 3)
    loads = [sum(sizes[name] for name, home in homes.items() if home == rank) for rank in range(3)]
    assert max(loads) <= 100
    assert min(loads) >= 80
    assert homes == shares(dict(reversed(sizes.items())), 3)
    assert shares({"a": 1}, 4) == {"a": 0}
