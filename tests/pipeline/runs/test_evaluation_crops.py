"""A run that evaluates full images: its predictions, its exports and its model card take them the same way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain import Pipeline
from drivetrain.loaders import FFCVLoader, convert, open_beton
from drivetrain.pipeline import FitResult, export, load_run
from drivetrain.pipeline.apps.exports.card import CARD
from drivetrain.pipeline.describe.inputs import Inputs
from drivetrain.pipeline.recipes.files import read_recipe
from loader_pictures import jpeg_bytes, picture
from PIL import Image
from safetensors import safe_open

SIZES = [(60, 80), (80, 60), (64, 64), (40, 90), (20, 17), (1, 70)]
MEAN = (0.5, 0.4, 0.3)
Ran = tuple[FitResult, Path, str]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """JPEGs of two classes, of several shapes."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(12):
        folder = root / "pictures" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.jpg").write_bytes(jpeg_bytes(picture(number, *SIZES[number % len(SIZES)])))
    convert(root / "pictures", root / "data.beton", progress=False)
    return str(root / "data.beton")


@pytest.fixture(scope="module", params=["whole", "fit"])
def run(request: pytest.FixtureRequest, data: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run with this `eval_crop`: its result, its folder, and its data."""
    root = tmp_path_factory.mktemp("crops")
    loading: dict[str, Any] = {
        "crop": "fit", "eval_crop": request.param, "interpolation": "nearest", "mean": MEAN,
    }  # fmt: skip
    pipeline = (
        Pipeline("cifar_resnet", num_classes=2, width=4)
        .load(data, data, batch_size=6, image_size=24, eval_image_size=(24, 32), workers=1, **loading)
        .optimize("sgd", lr=0.05)
    )
    assert Pipeline.from_recipe(pipeline.to_recipe()) == pipeline
    assert pipeline.to_recipe()["loading"]["eval_crop"] == request.param
    return pipeline.fit(epochs=1, out=root / "run", progress=False), root / "run", data


def evaluated(run: Ran) -> tuple[torch.Tensor, torch.Tensor]:
    """The images as FFCVLoader evaluates them, and the model's outputs."""
    result, _, data = run
    options = {"eval_crop": result.inputs.eval_crop, "interpolation": "nearest", "mean": MEAN}
    with FFCVLoader(data, batch_size=12, image_size=(24, 32), train=False, workers=1, **options) as loader:
        ((images, _),) = loader
    result.model.eval()
    with torch.no_grad():
        return images, result.model(images)


def pictures(data: str) -> list[Image.Image]:
    beton = open_beton(data)
    return [beton.image(index) for index in range(len(beton))]


def test_predictions_take_the_loaders_pixels(run: Ran) -> None:
    result, folder, data = run
    images, outputs = evaluated(run)
    own = torch.stack([result.preprocess(image) for image in pictures(data)])
    assert own.shape == (12, 3, 24, 32)
    assert torch.equal(own, images)
    centre = dataclasses.replace(result.inputs, eval_crop="center").transform()
    assert (torch.stack([centre(image) for image in pictures(data)]) - images).abs().max() > 0.5
    for rows in (result.predict(pictures(data)), load_run(folder).predict(pictures(data))):
        found = torch.tensor([[row["probabilities"][name] for name in "ab"] for row in rows])
        torch.testing.assert_close(found, outputs.softmax(1), rtol=0, atol=1e-5)


def test_its_files_have_the_crop(run: Ran, tmp_path: Path) -> None:
    result, folder, _ = run
    crop = result.inputs.eval_crop
    assert read_recipe(folder / "recipe.yaml")[0]["trained"]["eval_crop"] == crop
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["inputs"])["eval_crop"] == crop
    export(folder, tmp_path / "own.safetensors")
    with safe_open(tmp_path / "own.safetensors", framework="pt") as file:
        assert Inputs.from_dict(json.loads(file.metadata()["inputs"])) == result.inputs
    text = (tmp_path / CARD).read_text()
    if crop == "whole":
        assert (
            "RGB. Each full picture, resized to 24 × 32 pixels (nearest), scaled to 0–1, minus the mean (0.5"
            in text
        )
    else:
        known = "24 × 32 pixels (nearest), with its aspect ratio, and centred on the colour (128, 102, 76)"
        assert f"RGB. Each full picture, scaled to fit into {known}, scaled to 0–1" in text
    assert "central" not in text


@pytest.mark.long
@pytest.mark.parametrize("name", ["own.pt2", "own.onnx"])
def test_a_program_is_compared_on_these_pixels(run: Ran, name: str, tmp_path: Path) -> None:
    _, folder, _ = run
    exported = export(folder, tmp_path / name)
    assert exported.difference is not None
    assert exported.difference.images == "8 images of data.beton"
    largest = float(evaluated(run)[1][:8].abs().max())
    assert exported.difference.scale == pytest.approx(largest, rel=1e-4)


def test_facts_of_earlier_runs_still_load(run: Ran) -> None:
    saved = run[0].inputs.to_dict()
    assert saved.pop("eval_crop") != "center"
    assert Inputs.from_dict(saved).eval_crop == "center"


def test_the_preprocessing_is_shown(run: Ran) -> None:
    result = run[0]
    assert f"24 × 32, eval_crop='{result.inputs.eval_crop}', interpolation='nearest'" in repr(
        result.preprocess
    )
