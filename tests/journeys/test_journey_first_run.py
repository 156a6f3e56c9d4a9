"""Job 1: convert, inspect, train: from the command line, in Python, by a recipe, and in a first script."""

import inspect
import json
import sys
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, done
from drivetrain import CheckpointError, Pipeline
from drivetrain.pipeline import load_run
from journey_models import Net
from process_state import output_of

pytestmark = pytest.mark.long

SCRIPT = f"""
import torch
from torch import nn
from drivetrain import Pipeline

{inspect.getsource(Net)}
pipeline = Pipeline(Net, num_classes=3).load("train.beton", "val.beton", batch_size=8, image_size=32)
print(pipeline.plan())
result = pipeline.optimize("adamw", lr=0.01).fit(epochs=2, out="runs/first")
print(result.accuracy)
"""


def test_from_the_command_line_and_again_in_python() -> None:
    for part, images in (("train", 24), ("val", 12)):
        printed = done("convert", f"photos/{part}", f"own-{part}.beton", "--max-resolution", "160")
        assert f"{images} images" in printed
    done("verify", "own-train.beton")
    shown = done("inspect", "own-train.beton")
    assert all(folder.name in shown for folder in Path("photos/train").iterdir())
    data = ["--train", "own-train.beton", "--val", "own-val.beton"]
    printed = done("train", "mine.yaml", *data, "--out", "runs/cli", "epochs=3")
    files = ["checkpoints", "curves.png", "history.json", "model.safetensors", "plan.txt", "recipe.yaml"]
    assert sorted(path.name for path in Path("runs/cli").iterdir()) == files
    epochs = json.loads(Path("runs/cli/history.json").read_text())["epochs"]
    assert f"{100 * epochs[-1]['metrics']['top1']:.2f}" in printed

    again = Pipeline.from_recipe("runs/cli/recipe.yaml").fit(progress=False)
    assert [epoch.loss for epoch in again.history.epochs] == [epoch["loss"] for epoch in epochs]
    start = Pipeline("resnet18", num_classes=3)
    start = start.load("own-train.beton", "own-val.beton", batch_size=8, image_size=32)
    assert sorted(start.fit(epochs=1, progress=False).metrics) == ["top1", "val_loss"]


@pytest.mark.slow
@pytest.mark.process
def test_the_first_script_leaves_a_run_that_opens() -> None:
    """Its model is defined in the script itself: nothing can be imported by a module's name."""
    Path("first.py").write_text(SCRIPT)
    printed = output_of(sys.executable, "first.py", env=ENVIRONMENT)
    assert "build Net" in printed
    with pytest.raises(CheckpointError, match="trust_code=True"):
        load_run("runs/first")
    result = load_run("runs/first", trust_code=True)
    assert printed.splitlines()[-1] == str(result.accuracy)
    assert result.evaluate() == pytest.approx(result.metrics, abs=1e-5)
    done("train", "runs/first/recipe.yaml", "--out", "runs/again")
    assert load_run("runs/again", trust_code=True).metrics == pytest.approx(result.metrics, abs=1e-4)
    (row,) = result.predict(next(Path("photos/val").rglob("*.jpg")))
    assert row["class"] in result.inputs.classes
