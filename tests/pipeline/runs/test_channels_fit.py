"""A model of images with one channel of 16 bits, and of four channels: trained, resumed, exported, and predicting."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import call
from drivetrain import DataError, Pipeline, PlanError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, open_beton
from drivetrain.pipeline import FitResult, export, load_run
from drivetrain.pipeline.apps.exports.card import CARD
from drivetrain.pipeline.describe.inputs import Inputs
from numpy.typing import NDArray
from PIL import Image
from pipeline_data import toy_arrays
from same_runs import assert_same_run

LOADING: dict[str, Any] = {
    "batch_size": 16, "image_size": 16, "workers": 1, "crop": "whole", "interpolation": "nearest", "flip": False,
    "eval_ratio": 1.0, "mean": (0.4,), "std": (0.2,),
}  # fmt: skip
NAMES = ("a", "b", "c", "d")


def wide(images: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """One channel of 16 bits, with noise in the lower 8."""
    noise = np.random.default_rng(3).integers(0, 256, images.shape[:3])
    return (images[..., 0].astype(np.int64) * 256 + noise).astype(np.uint16)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    images, labels = toy_arrays(64, seed=1)
    path = tmp_path_factory.mktemp("wide") / "wide.beton"
    convert((wide(images), labels), path, image_mode="I;16", classes=NAMES, progress=False)
    return str(path)


def pipeline(data: str, **model: Any) -> Pipeline:
    made = Pipeline("cifar_resnet", num_classes=4, width=8, **{"channels": 1, **model}).load(data, data, **LOADING)
    return made.optimize("sgd", lr=0.05, momentum=0.9, schedule="constant")


@pytest.fixture(scope="module")
def run(data: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[FitResult, Path]:
    out = tmp_path_factory.mktemp("run") / "run"
    return pipeline(data).fit(epochs=6, out=out, progress=False), out


def test_it_learns_and_resumes(run: tuple[FitResult, Path], data: str, tmp_path: Path) -> None:
    result, _ = run
    assert result.accuracy is not None
    assert result.accuracy > 0.9
    made = pipeline(data)
    assert Pipeline.from_recipe(made.to_recipe()) == made
    made.fit(epochs=3, out=tmp_path / "again", progress=False)
    again = made.fit(epochs=6, out=tmp_path / "again", resume="auto", progress=False)
    assert_same_run(again, result)


def test_predictions_are_those_of_the_evaluation(run: tuple[FitResult, Path], data: str, tmp_path: Path) -> None:
    result, folder = run
    beton = open_beton(data)
    with FFCVLoader(data, train=False, **LOADING | {"batch_size": 64}) as loader, torch.no_grad():
        ((images, _),) = loader
        expected = result.model.eval()(images).softmax(1)
    arrays = np.stack([beton.pixels(number) for number in range(64)])
    assert (result.inputs.channels, result.inputs.depth) == (1, 16)
    torch.testing.assert_close(result.preprocess(arrays[5]), images[5], rtol=0, atol=2e-6)
    images_of_file = [beton.image(number) for number in range(64)]
    for given in (arrays, list(arrays), images_of_file, list(arrays[..., None])):
        found = [[row["probabilities"][name] for name in NAMES] for row in load_run(folder).predict(given)]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-5)
    (row,) = result.predict(arrays[7])
    assert row["class"] == NAMES[int(expected[7].argmax())]
    path = tmp_path / "one.png"
    Image.fromarray(arrays[7]).save(path)
    (line,) = call("predict", str(folder), str(path), "--json").out.splitlines()
    assert json.loads(line)["probabilities"] == pytest.approx(row["probabilities"], abs=1e-5)
    Image.fromarray((arrays[7] >> 8).astype(np.uint8)).save(path)
    with pytest.raises(DataError, match=r"one\.png does not suit the model: its values have 8 bits"):
        result.predict(path)


@pytest.mark.slow
@pytest.mark.long
def test_it_is_exported(run: tuple[FitResult, Path], data: str, tmp_path: Path) -> None:
    _, folder = run
    for source in (None, data):
        exported = export(folder, tmp_path / "model.pt2", data=source)
        assert exported.difference is not None
        assert exported.difference.images == "8 images of wide.beton"
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert program(torch.zeros(3, 1, 16, 16)).shape == (3, 4)
    assert "float32 `(N, 1, 16, 16)`, one channel, from 16 bits." in (tmp_path / CARD).read_text()
    Path(data).rename(tmp_path / "elsewhere.beton")  # then on random images
    try:
        exported = export(folder, tmp_path / "model.pt2")
    finally:
        (tmp_path / "elsewhere.beton").rename(data)
    assert exported.difference is not None
    assert exported.difference.images == "8 random images"


def test_a_model_of_three_channels_is_refused(data: str) -> None:
    with pytest.raises(PlanError, match="does not accept images of 16 × 16 pixels with 1 channel: "):
        pipeline(data, channels=3).fit(epochs=1, progress=False)
    wrong = pipeline(data).load(data, data, **LOADING | {"mean": (0.5,) * 3, "std": (0.5,) * 3})
    with pytest.raises((DataError, PlanError), match="channel"):
        wrong.fit(epochs=1, progress=False)


def test_it_trains_in_torchs_loader(data: str) -> None:
    made = pipeline(data)
    ours = made.fit(epochs=1, progress=False)
    theirs = made.load(data, data, **LOADING | {"loader": "torch", "workers": 0}).fit(epochs=1, progress=False)
    for result in (ours, theirs):
        assert np.isfinite(result.history.epochs[0].loss)
    with TorchLoader(data, train=False, **LOADING | {"workers": 0}) as loader:
        images, _ = next(iter(loader))
    assert images.shape == (16, 1, 16, 16)


def test_four_channels(tmp_path: Path) -> None:
    """Of 8 bits, with another color space than RGB in predictions, which are converted."""
    images, labels = toy_arrays(32, seed=1)
    four = np.concatenate([images, images[..., :1]], axis=3)
    convert((four, labels), tmp_path / "four.beton", image_mode="RGBA", progress=False)
    data = str(tmp_path / "four.beton")
    made = pipeline(data, channels=4).load(data, data, **LOADING | {"mean": (0.5,) * 4, "std": (0.25,) * 4})
    result = made.fit(epochs=1, progress=False)
    assert (result.inputs.channels, result.inputs.depth) == (4, 8)
    assert len(result.predict([four[0], Image.fromarray(four[1]), Image.fromarray(images[2])])) == 3


def test_an_array_in_color_is_one_picture_for_a_gray_model(tmp_path: Path) -> None:
    """As for `convert`, and not a picture per row."""
    images, labels = toy_arrays(32, seed=1)
    convert((images[..., 0].copy(), labels), tmp_path / "gray.beton", image_mode="L", progress=False)
    result = pipeline(str(tmp_path / "gray.beton")).fit(epochs=1, progress=False)
    (expected,) = result.predict(Image.fromarray(images[0]))
    for given in (images[0], torch.from_numpy(images[0])):
        assert result.predict(given) == [expected]
    assert len(result.predict(images[..., 0])) == 32


def test_inputs_of_earlier_runs_are_rgb_and_central_crops() -> None:
    saved = {"image_size": 32, "eval_ratio": 0.875, "mean": [0.5] * 3, "std": [0.5] * 3, "classes": ["a"]}
    inputs = Inputs.from_dict(saved)
    assert (inputs.channels, inputs.depth, inputs.eval_crop) == (3, 8, "center")
    assert Inputs.from_dict(json.loads(json.dumps(inputs.to_dict()))) == inputs
