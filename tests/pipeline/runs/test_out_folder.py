"""Foreign or damaged files in a run's folder never hide an error, and never stop a training run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import CheckpointError, DataError, DrivetrainError
from drivetrain.common.storage.tensors import save_weights
from drivetrain.pipeline import Checkpoints, TrainingInterrupted
from drivetrain.pipeline.apps.cli.training import what_is_left
from drivetrain.pipeline.runs.folder import draw_curves
from drivetrain.pipeline.telemetry.history import read_history
from pipeline_data import BATCH, TRAIN, FailsAt, Sleepy, Toy, numbers, plain_model
from safetensors.torch import load_file

STEPS = TRAIN // BATCH
EPOCH = {"epoch": 1, "loss": 1.0, "val_loss": None, "metrics": {}, "images_per_s": 1.0, "data_wait_fraction": 0.0,
         "seconds": 1.0, "lr": 0.1}  # fmt: skip
FOREIGN = {
    "another's": json.dumps({"runs": [1, 2]}), "not JSON": "epoch,loss\n1,2\n", "empty": "", "a list": "[]",
    "a number": "5", "null": "null", "no list": json.dumps({"epochs": 5}), "no epochs": json.dumps({"epochs": [5]}),
    "a word": json.dumps({"epochs": "many"}), "deep": "[" * 100_000, "other fields": json.dumps({"epochs": [{"a": 1}]}),
    "words in it": json.dumps({"epochs": [{**EPOCH, "loss": "much", "lr": []}]}), "bytes": "\udcff",
    "no provenance": json.dumps({"epochs": [EPOCH], "provenance": 5, "recipe": [1]}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_history_hides_no_error_and_is_drawn_without_one(toy: Toy, tmp_path: Path, name: str) -> None:
    (tmp_path / "history.json").write_text(FOREIGN[name], errors="surrogateescape")
    drawn = draw_curves(tmp_path)
    assert drawn.startswith("There is no curves.png: ")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        toy.pipeline(plain_model).fit(epochs=1, out=tmp_path, progress=False, resume=tmp_path / "none")
    with pytest.raises(DataError, match="gone"):
        toy.pipeline(plain_model).load(str(tmp_path / "gone.beton"), batch_size=BATCH, image_size=16).fit(
            epochs=1, out=tmp_path, progress=False
        )
    assert (tmp_path / "history.json").read_text(errors="surrogateescape") == FOREIGN[name]


def test_what_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    history = tmp_path / "history.json"
    assert draw_curves(tmp_path) == ""
    history.mkdir()
    assert "is not the history of a run" in draw_curves(tmp_path)
    history.rmdir()
    history.symlink_to(history)
    assert "is not the history of a run" in draw_curves(tmp_path)
    history.unlink()
    history.write_text(json.dumps({"epochs": [EPOCH]}))
    (tmp_path / "curves.png").mkdir()
    assert "curves.png could not be written" in draw_curves(tmp_path)
    assert read_history(tmp_path) is not None


@pytest.mark.parametrize("name", [
    "history.json", "model.safetensors", "curves.png", "metrics.csv", "plan.txt", "recipe.yaml", "checkpoints",
])  # fmt: skip
def test_a_folder_in_the_place_of_a_file_is_named(toy: Toy, tmp_path: Path, name: str) -> None:
    """And a file in that of the checkpoints. Before the first step, and what it holds stays."""
    inside = tmp_path / name / "mine.txt"
    if name == "checkpoints":
        (tmp_path / name).write_text("mine")
    else:
        inside.parent.mkdir()
        inside.write_text("mine")
    with pytest.raises(DrivetrainError, match=name.replace(".", r"\.")) as caught:
        toy.pipeline(lambda: Sleepy(0)).fit(epochs=1, out=tmp_path, progress=False, logger="csv")
    assert type(caught.value).__module__ == "drivetrain.common.errors"
    assert (tmp_path / name if name == "checkpoints" else inside).read_text() == "mine"
    assert not (tmp_path / "history.json").is_file()


@pytest.mark.long
def test_ctrl_c_in_the_epoch_that_was_resumed_counts_those_before(toy: Toy, tmp_path: Path) -> None:
    """With their result where the folder has it; an epoch that this process finishes is one more."""
    run, how = tmp_path / "run", Checkpoints(every_steps=1, keep=99, background=False)
    arguments: dict[str, Any] = {"epochs": 4, "progress": False}

    def interrupted(step: int, **more: Any) -> TrainingInterrupted:
        pipeline = toy.pipeline(lambda: FailsAt(step, KeyboardInterrupt))
        kept = how if "out" in more else None
        with pytest.raises(TrainingInterrupted) as caught:
            pipeline.fit(**arguments, **more, checkpoints=kept, changed_model="resume" in more)
        return caught.value

    first = interrupted(2 * STEPS + 2, out=run)
    assert (first.epochs, first.result is None) == (2, False)
    again = interrupted(1, out=run, resume="auto")
    assert again.epochs == 2
    assert again.result is not None
    assert numbers(again.result) == numbers(first.result)
    kept = load_file(run / "model.safetensors")
    torch.testing.assert_close(again.result.model.state_dict(), kept, rtol=0, atol=0)
    assert "after epoch 2; this exception's result contains" in str(again)
    assert what_is_left(again, run).startswith("Epoch 2 was the last to finish.")
    # A process that was killed between the two files has left weights that are an epoch ahead of the history.
    save_weights(kept, run / "model.safetensors", epochs=3)
    ahead = interrupted(0, out=run, resume="auto")
    assert (ahead.epochs, ahead.result) == (2, None)
    save_weights(kept, run / "model.safetensors", epochs=2)
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    elsewhere = interrupted(0, resume=newest)
    assert (elsewhere.epochs, elsewhere.result) == (2, None)
    assert "after epoch 2, whose weights are not in this process" in str(elsewhere)
    assert what_is_left(elsewhere, None) == "Epoch 2 was the last to finish."
    third = interrupted(2, out=run, resume="auto")
    assert third.epochs == 3
    assert third.result is not None
    assert len(third.result.history.epochs) == 3
    before = interrupted(1, resume=run / "checkpoints" / "step-00000001")
    assert (before.epochs, before.result) == (0, None)
    assert "before its first epoch finished" in str(before)
