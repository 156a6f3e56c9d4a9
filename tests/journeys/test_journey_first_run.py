"""Job 1: convert, inspect, train: from the command line, in Python, by a recipe, and in a first script."""

import json
import sys
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, call
from drivetrain import CheckpointError, Pipeline
from drivetrain.pipeline import load_run
from process_state import output_of

SCRIPT = """
from torch import nn
from drivetrain import Pipeline

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        return self.head(self.body(images).mean((2, 3)))

pipeline = Pipeline(Net, num_classes=3).load("train.beton", "val.beton", batch_size=8, image_size=32)
print(pipeline.plan())
result = pipeline.optimize("adamw", lr=0.01).fit(epochs=2, out="runs/first")
print(result.accuracy)
"""


@pytest.mark.long
def test_from_the_command_line_and_again_in_python() -> None:
    for part, images in (("train", 24), ("val", 12)):
        end = call("convert", f"photos/{part}", f"own-{part}.beton", "--max-resolution", "160")
        assert end.code == 0, end
        assert f"{images} images" in end.out
    assert call("verify", "own-train.beton").code == 0
    shown = call("inspect", "own-train.beton").out
    assert all(folder.name in shown for folder in Path("photos/train").iterdir())
    data = ["--train", "own-train.beton", "--val", "own-val.beton"]
    end = call("train", "mine.yaml", *data, "--out", "runs/cli", "epochs=3")
    assert end.code == 0, end
    files = ["checkpoints", "curves.png", "history.json", "model.safetensors", "plan.txt", "recipe.yaml"]
    assert sorted(path.name for path in Path("runs/cli").iterdir()) == files
    epochs = json.loads(Path("runs/cli/history.json").read_text())["epochs"]
    assert f"{100 * epochs[-1]['metrics']['top1']:.2f}" in end.out

    again = Pipeline.from_recipe("runs/cli/recipe.yaml").fit(progress=False)
    assert [epoch.loss for epoch in again.history.epochs] == [epoch["loss"] for epoch in epochs]
    by_hand = Pipeline("resnet18", num_classes=3).load(
        "own-train.beton", "own-val.beton", batch_size=8, image_size=32
    )
    assert sorted(by_hand.fit(epochs=1, progress=False).metrics) == ["top1", "val_loss"]


@pytest.mark.process
@pytest.mark.long
def test_the_first_script_leaves_a_run_that_opens(capsys: pytest.CaptureFixture[str]) -> None:
    """Its model is defined in the script itself: nothing can be imported by a module's name."""
    Path("first.py").write_text(SCRIPT)
    printed = output_of(sys.executable, "first.py", env=ENVIRONMENT)
    assert "build Net" in printed
    with pytest.raises(CheckpointError, match="trust_code=True"):
        load_run("runs/first")
    result = load_run("runs/first", trust_code=True)
    assert printed.splitlines()[-1] == str(result.accuracy)
    assert result.evaluate() == pytest.approx(result.metrics, abs=1e-5)
    end = call("train", "runs/first/recipe.yaml", "--out", "runs/again")
    assert end.code == 0, end
    again = load_run("runs/again", trust_code=True)
    assert again.metrics == pytest.approx(result.metrics, abs=1e-4)
    (row,) = result.predict(next(Path("photos/val").rglob("*.jpg")))
    assert row["class"] in result.inputs.classes
    assert not capsys.readouterr().err
