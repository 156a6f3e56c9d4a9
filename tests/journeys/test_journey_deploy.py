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
from command_line import ENVIRONMENT, done
from drivetrain.pipeline import FitResult, load_run
from journey_models import photos
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import squeezenet1_1

pytestmark = pytest.mark.long


@pytest.fixture
def run() -> FitResult:
    photos("squeezenet1_1", image_size=64).fit(epochs=1, out="runs/pets", progress=False)
    return load_run("runs/pets")


def picture() -> Path:
    return next(Path("photos/val").rglob("*.jpg"))


@pytest.mark.slow
def test_every_export_is_the_model(run: FitResult) -> None:
    with Image.open(picture()) as image:
        (row,) = run.predict(image)
        pixels = run.preprocess(image)[None]
    for name in ("pets.safetensors", "pets.pt2", "pets.onnx"):
        done("export", "runs/pets", name, "--best")
    model = squeezenet1_1(num_classes=3)
    model.load_state_dict(load_file("pets.safetensors"))
    about = {"inputs": ""}
    program = torch.export.load("pets.pt2", extra_files=about).module()
    (onnx,) = onnxruntime.InferenceSession("pets.onnx").run(None, {"images": pixels.numpy()})
    classes = json.loads(about["inputs"])["classes"]
    for outputs in (model.eval()(pixels), program(pixels), torch.from_numpy(onnx)):
        found = dict(zip(classes, outputs.softmax(1)[0].tolist(), strict=True))
        assert found == pytest.approx(row["probabilities"], abs=1e-4)
    assert "top1" in Path("MODEL_CARD.md").read_text()


@pytest.mark.slow
@pytest.mark.process
def test_a_folder_becomes_a_table_and_a_server_answers(run: FitResult, started: list[subprocess.Popen[str]]) -> None:
    Path("mixed").mkdir()
    Path("mixed/good.jpg").write_bytes(picture().read_bytes())
    Path("mixed/bad.jpg").write_bytes(b"no picture")
    for source, options in (("mixed", ["--on-error", "skip"]), ("photos/val", [])):
        done("predict", "runs/pets", source, "--out", f"{Path(source).name}.csv", *options)
    with Path("mixed.csv").open(newline="") as file:
        assert [bool(row["error"]) for row in csv.DictReader(file)] == [True, False]
    with Path("val.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert [row["class"] for row in rows] == [run.predict(row["image"])[0]["class"] for row in rows]

    command = [str(Path(sys.executable).with_name("drivetrain")), "serve", "runs/pets", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    started.append(process)
    address = process.stdout.readline().split()[1]
    data = picture().read_bytes()
    with urllib.request.urlopen(f"{address}/predict", data, timeout=60) as answer:
        found = json.loads(answer.read())
    assert found["probabilities"] == pytest.approx(run.predict(data)[0]["probabilities"], abs=1e-5)
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert b"<html" in answer.read().lower()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
