"""Job 11: export a run, predict a folder into a table, serve it over HTTP."""

import csv
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import onnxruntime
import pytest
import torch
from command_line import ENVIRONMENT, call
from drivetrain import Pipeline
from drivetrain.pipeline import FitResult, load_run
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import resnet18


@pytest.fixture(scope="module")
def trained(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    pipeline = Pipeline("resnet18", num_classes=3)
    pipeline = pipeline.load(made / "train.beton", made / "val.beton", batch_size=8, image_size=64)
    pipeline.optimize("adamw", lr=1e-3).fit(epochs=1, out=run, progress=False)
    return run


@pytest.fixture
def run(trained: Path) -> FitResult:
    Path("runs").mkdir()
    Path("runs/pets").symlink_to(trained)
    return load_run("runs/pets")


@pytest.mark.long
def test_every_export_is_the_model(run: FitResult) -> None:
    with Image.open(next(Path("photos/val").rglob("*.jpg"))) as picture:
        (row,) = run.predict(picture)
        pixels = run.preprocess(picture)[None]
    for name in ("pets.safetensors", "pets.pt2", "pets.onnx"):
        end = call("export", "runs/pets", name, "--best")
        assert end.code == 0, end
    model = resnet18(num_classes=3)
    model.load_state_dict(load_file("pets.safetensors"))
    about = {"inputs": ""}
    program = torch.export.load("pets.pt2", extra_files=about).module()
    session = onnxruntime.InferenceSession("pets.onnx")
    (onnx,) = session.run(None, {"images": pixels.numpy()})
    for outputs in (model.eval()(pixels), program(pixels), torch.from_numpy(onnx)):
        probabilities = dict(
            zip(json.loads(about["inputs"])["classes"], outputs.softmax(1)[0].tolist(), strict=True)
        )
        assert probabilities == pytest.approx(row["probabilities"], abs=1e-4)
    assert "top1" in Path("MODEL_CARD.md").read_text().lower().replace("-", "")


def test_a_folder_becomes_a_table(run: FitResult) -> None:
    Path("mixed").mkdir()
    Path("mixed/good.jpg").write_bytes(next(Path("photos/val").rglob("*.jpg")).read_bytes())
    Path("mixed/bad.jpg").write_bytes(b"no picture")
    assert "bad.jpg" in call("predict", "runs/pets", "mixed").err
    end = call("predict", "runs/pets", "mixed", "--out", "mixed.csv", "--on-error", "skip")
    assert end.code == 0, end
    assert call("predict", "runs/pets", "photos/val", "--out", "predictions.csv").code == 0
    with open("predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    right = sum(Path(row["image"]).parent.name == row["class"] for row in rows)
    assert len(rows) == 12
    assert right / 12 == pytest.approx(run.accuracy, abs=1 / 12 + 1e-6)  # JPEGs that convert scaled down
    with open("mixed.csv", newline="") as file:
        assert [bool(row["error"]) for row in csv.DictReader(file)] == [True, False]


@pytest.mark.process
@pytest.mark.long
def test_a_served_run_answers(run: FitResult, started: list[subprocess.Popen[str]]) -> None:
    program = Path(sys.executable).with_name("drivetrain")
    process = subprocess.Popen(
        [program, "serve", "runs/pets", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT,
    )  # fmt: skip
    started.append(process)
    line = process.stdout.readline()
    address = line.split()[1]
    data = next(Path("photos/val").rglob("*.jpg")).read_bytes()
    with urllib.request.urlopen(f"{address}/predict", data, timeout=60) as answer:
        found = json.loads(answer.read())
    (row,) = run.predict(data)
    assert found["class"] == row["class"]
    assert found["probabilities"] == pytest.approx(row["probabilities"], abs=1e-5)
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert b"<html" in answer.read().lower()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) in (0, 130)
