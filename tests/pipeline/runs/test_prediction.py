"""Single images through a trained model: the loader's own pixels, answers with names, and a run's folder; a run that
evaluates full images predicts, exports and describes them the same way."""

import csv
import dataclasses
import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from command_line import call
from drivetrain import Classification, DataError, DrivetrainError, MultiLabel, Pipeline, PlanError, Regression
from drivetrain.common import machine
from drivetrain.common.errors import CheckpointError
from drivetrain.common.pictures import gallery
from drivetrain.loaders import FFCVLoader, convert, open_beton
from drivetrain.pipeline import FitResult, export, load_run
from drivetrain.pipeline.apps.exports.card import CARD
from drivetrain.pipeline.describe.inputs import Inputs
from drivetrain.pipeline.recipes.files import read_recipe
from drivetrain.pipeline.runs.prediction import Predicted, Predictions, listed, predicted
from drivetrain.transforms import EMA, BlurPool, TestTimeFlip
from loader_pictures import jpeg_bytes, picture
from numpy.typing import NDArray
from PIL import Image
from pipeline_data import BATCH, SIDE, TRAIN, Toy, batch_norm_model, write_toy
from safetensors import safe_open
from task_jobs import Outputs

SIZES = [(60, 80), (80, 60), (64, 64), (47, 90), (33, 33), (51, 70)]
CLASSES = ("bird", "cat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of two classes, 24 JPEG files."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(24):
        name = CLASSES[number % 2]
        (root / name).mkdir(exist_ok=True)
        pixels = picture(number, *SIZES[number % len(SIZES)])
        pixels = pixels // 2 + (100 if number % 2 else 0)  # cats are bright
        (root / name / f"{number:02}.jpg").write_bytes(jpeg_bytes(pixels.astype(np.uint8)))
    return root


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FitResult, Path, str]:
    """A run on the pictures: its result, its folder, and its data."""
    out = tmp_path_factory.mktemp("run")
    convert(folder, out / "data.beton", progress=False)
    data = str(out / "data.beton")
    pipeline = Pipeline("task_jobs:Outputs", num_classes=2).load(
        data, data, batch_size=12, image_size=24, eval_image_size=32, workers=1, mean=(0.5, 0.4, 0.3),
        eval_ratio=0.8,
    )  # fmt: skip
    pipeline = pipeline.transform(BlurPool(min_channels=1), EMA(half_life=2))
    pipeline = pipeline.optimize("sgd", lr=0.3, momentum=0.9)
    return pipeline.fit(epochs=12, out=out / "a run", progress=False), out / "a run", data


def originals(path: str) -> list[Image.Image]:
    """The decoded pictures of a file, in its order."""
    beton = open_beton(path)
    return [Image.open(io.BytesIO(data)) for data in beton.read("image", np.arange(len(beton)))]


def loaded(data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The pixels of the run's evaluation, and the labels."""
    settings: dict[str, Any] = {"eval_ratio": 0.8, "mean": (0.5, 0.4, 0.3)}
    with FFCVLoader(data, batch_size=24, image_size=32, train=False, workers=1, **settings) as loader:
        ((images, labels),) = loader
    return images, labels


def test_its_pixels_are_the_loaders(run: tuple[FitResult, Path, str], folder: Path) -> None:
    """Of all ways to give a picture."""
    result, _, data = run
    pixels, _ = loaded(data)
    files = sorted(folder.glob("*/*.jpg"))
    for given in (files, originals(data), [np.asarray(image) for image in originals(data)]):
        assert torch.equal(torch.stack([result.preprocess(image) for image in given]), pixels)


def test_predictions_are_those_of_the_evaluation(run: tuple[FitResult, Path, str], folder: Path) -> None:
    result, _, data = run
    images, labels = loaded(data)
    with torch.no_grad():
        expected = result.model(images).softmax(1)
    rows = result.predict(originals(data))
    found = torch.tensor([[row["probabilities"][name] for name in CLASSES] for row in rows])
    assert (found - expected).abs().max() < 1e-5
    right = sum(row["class"] == CLASSES[label] for row, label in zip(rows, labels.tolist(), strict=True))
    assert right == round((result.accuracy or 0) * 24)
    assert right > 20
    assert [row["image"] for row in rows] == list(range(24))
    for row in rows:
        values = [*row["probabilities"].values()]
        assert row["probability"] == max(values) == values[0]
        assert sum(values) == pytest.approx(1, abs=1e-5)
    path = sorted(folder.glob("*/*.jpg"))[0]
    (one,) = result.predict(path)
    array = np.asarray(Image.open(path))
    assert one["image"] == str(path)
    for again in (array, torch.tensor(array), torch.tensor(array).permute(2, 0, 1)):
        assert [row["probabilities"] for row in result.predict(again)] == [one["probabilities"]]
    fewer = result.predict(originals(data), batch_size=5)
    assert [row["class"] for row in fewer] == [row["class"] for row in rows]
    assert result.predict([]) == []
    for size in (0, -5, 1.5):
        with pytest.raises(PlanError, match=f"batch_size={size} must be a positive integer"):
            result.predict(originals(data), batch_size=size)  # type: ignore[arg-type]
    assert not result.model.training


@pytest.mark.parametrize("instructions", ["", "avx512_bf16"])
def test_predictions_have_the_views_and_the_precision_of_the_evaluation(
    run: tuple[FitResult, Path, str], instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`precision="auto"` is bf16 on a CPU that has it; torch computes the same on others."""
    monkeypatch.setattr(machine, "bf16_instructions", lambda: instructions)
    _, _, data = run
    pipeline = Pipeline("task_jobs:Outputs", num_classes=2).load(data, data, batch_size=12, image_size=24, workers=1)
    pipeline = pipeline.transform(TestTimeFlip(shift=2)).optimize("sgd", lr=0.05)
    result = pipeline.distribute("single", precision="auto").fit(epochs=1, progress=False)
    rows, errors = result.predict(data, batch_size=12), result.errors()
    assert [CLASSES.index(row["class"]) for row in rows] == errors.predictions.tolist()
    assert [row["probability"] for row in rows] == pytest.approx(errors.probabilities.tolist(), abs=1e-6)
    batch = torch.stack([result.preprocess(image) for image in originals(data)])
    with torch.no_grad():
        plain = result.model(batch).softmax(1).amax(1)
    assert (plain - torch.tensor([row["probability"] for row in rows])).abs().max() > 1e-4


def test_what_was_trained_in_fp16_is_predicted_in_float32_on_a_cpu(
    run: tuple[FitResult, Path, str], folder: Path
) -> None:  # fmt: skip
    """Which would emulate it."""
    result, images = run[0], sorted(folder.glob("*/*.jpg"))[:5]
    assert result.spec is not None
    half = dataclasses.replace(result, spec=result.spec.distribute("single", device="cpu", precision="fp16"))
    assert half.predict(images) == result.predict(images)


def test_a_run_is_loaded_from_its_folder(run: tuple[FitResult, Path, str], folder: Path, tmp_path: Path) -> None:
    result, out, _ = run
    loaded = load_run(out)
    images = sorted(folder.glob("*/*.jpg"))[:5]
    assert loaded.predict(images) == result.predict(images)
    assert loaded.history.epochs == result.history.epochs
    with safe_open(out / "model.safetensors", framework="pt") as file:
        about = file.metadata()
    inputs = json.loads(about["inputs"])
    assert inputs == {
        "image_size": 32, "eval_ratio": 0.8, "mean": [0.5, 0.4, 0.3], "std": [0.229, 0.224, 0.225],
        "interpolation": "bilinear", "eval_crop": "center", "classes": list(CLASSES), "channels": 3, "depth": 8,
    }  # fmt: skip
    assert json.loads(about["task"]) == "Classification()"
    recipe, _ = read_recipe(out / "recipe.yaml")
    assert recipe["trained"] == {"task": "Classification()", **inputs}
    for name, words in (
        ("history.json", "no finished epoch"),
        ("recipe.yaml", "no recipe.yaml, because"),
        ("model.safetensors", "does not have the weights after epoch 12"),
    ):
        shutil.copytree(out, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
        (tmp_path / name / name).unlink()
        with pytest.raises(CheckpointError, match=words):
            load_run(tmp_path / name)
    with pytest.raises(DrivetrainError, match="no finished epoch"):
        load_run(tmp_path / "nowhere")
    weights = tmp_path / "history.json" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1  # as a disk or a store may return it
    weights.write_bytes(content)
    shutil.copy(out / "history.json", tmp_path / "history.json")
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged, or does not have the weights"):
        load_run(tmp_path / "history.json")
    with pytest.raises(DrivetrainError, match=r"model.safetensors is damaged: it is not what was written"):
        Pipeline.from_recipe(out / "recipe.yaml").evaluate(weights)


def test_a_runs_recipe_trains_again_with_other_data(
    run: tuple[FitResult, Path, str], folder: Path, tmp_path: Path
) -> None:
    """The facts of the run that wrote it are not options: the new run writes its own."""
    result, out, _ = run
    for name in CLASSES:
        shutil.copytree(folder / name, tmp_path / "renamed" / f"a {name}")
    data = str(tmp_path / "renamed.beton")
    convert(tmp_path / "renamed", data, progress=False)
    (out / "recipe.yaml").read_text().index("classes: [bird, cat]")  # in one line
    assert Pipeline.from_recipe(out / "recipe.yaml") == Pipeline.from_recipe(
        {key: value for key, value in read_recipe(out / "recipe.yaml")[0].items() if key != "trained"}
    ).replace(recipe="recipe.yaml")
    again = tmp_path / "again"
    end = call(
        "train", str(out / "recipe.yaml"), "epochs=1", "eval_image_size=40", "--train", data, "--val", data, "--out",
        str(again), "--quiet",
    )  # fmt: skip
    assert end.code == 0, end.err
    trained = read_recipe(again / "recipe.yaml")[0]["trained"]
    assert (trained["classes"], trained["image_size"]) == (["a bird", "a cat"], 40)
    inputs = dataclasses.replace(result.inputs, classes=("a bird", "a cat"), image_size=40)
    assert load_run(again).inputs == inputs
    text = (again / "recipe.yaml").read_text().replace("trained: {", "trained: [")
    (tmp_path / "odd.yaml").write_text(text.replace("trained:\n", "trained: 3\nx:\n"))
    assert "trained" in call("train", str(tmp_path / "odd.yaml")).line


def test_the_command(run: tuple[FitResult, Path, str], folder: Path) -> None:
    result, out, _ = run
    images = [str(path) for path in sorted(folder.glob("*/*.jpg"))[:3]]
    shown = call("predict", str(out), *images)
    assert shown.code == 0, shown.err
    for row in result.predict(images):
        assert f"{row['class']} {row['probability']:.1%}" in shown.out
    lines = call("predict", str(out), *images, "--json").out.splitlines()
    assert [json.loads(line) for line in lines] == result.predict(images)
    assert "needs at least one image" in call("predict", str(out)).line
    assert "is not a file" in call("predict", str(out), "nothing.jpg").line
    assert "has no images" in call("predict", str(out), f"{out}/checkpoints").line
    assert "cannot be read as an image" in call("predict", str(out), str(out / "history.json")).line
    assert "no finished epoch" in call("predict", str(folder), images[0]).line


def test_sources_of_images(run: tuple[FitResult, Path, str], folder: Path) -> None:
    """A folder, a pattern and the `.beton` of the same files give the same rows."""
    result, _, data = run
    files = [str(path) for path in sorted(folder.glob("*/*.jpg"))]
    expected = result.predict(files)
    assert [row["image"] for row in expected] == files
    assert result.predict(folder, batch_size=7, progress=True) == expected
    assert result.predict(f"{folder}/**/*.jpg") == expected
    samples = result.predict(data)
    assert [row.pop("image") for row in samples] == [f"{data}[{n}]" for n in range(24)]
    assert samples == [{key: row[key] for key in row if key != "image"} for row in expected]
    with pytest.raises(DataError, match="No file matches"):
        result.predict(f"{folder}/*.jpg")


def test_pipes_in_a_folder_are_no_images(tmp_path: Path) -> None:
    """A read waits until somebody writes to one."""
    (tmp_path / "x.jpg").write_bytes(jpeg_bytes(picture(0, 20, 20)))
    os.mkfifo(tmp_path / "y.jpg")
    assert [each.name for each in listed(tmp_path, 3)] == [str(tmp_path / "x.jpg")]


@pytest.mark.parametrize(
    ("values", "shape"), [(lambda logits: logits.mean(), r"\(\)"), (lambda logits: logits.mean(0), r"\(2,\)")]
)
def test_predictions_that_are_not_of_each_image_are_refused(
    run: tuple[FitResult, Path, str], values: Any, shape: str
) -> None:
    """Such as a scale that a model returns next to its logits."""

    class Scaled(Classification):
        def predict(self, outputs: Any) -> Any:
            return {"logits": outputs, "scale": values(outputs)}

    result, _, data = run
    facts = {name: getattr(result, name) for name in ("model", "inputs", "transforms", "spec")}
    own: Any = SimpleNamespace(task=Scaled(), **facts)
    words = rf"Scaled\.predict returned a tensor of shape {shape} for 3 image.*leaves the others out"
    with pytest.raises(PlanError, match=words):
        list(predicted(own, listed(originals(data)[:3], 3), 32, "raise", False))


def test_stored_pixels_are_predicted(run: tuple[FitResult, Path, str], tmp_path: Path) -> None:
    pixels = np.stack([picture(seed, 40, 50) for seed in range(3)])
    convert((pixels, np.arange(3) % 2), tmp_path / "raw.beton", write_mode="raw", progress=False)
    found, expected = run[0].predict(tmp_path / "raw.beton"), run[0].predict(pixels)
    assert [row["probabilities"] for row in found] == [row["probabilities"] for row in expected]


def test_images_in_a_field_of_another_name(run: tuple[FitResult, Path, str], tmp_path: Path) -> None:
    """FFCV's writer lets the user name it."""
    result, _, data = run
    renamed = tmp_path / "renamed.beton"
    renamed.write_bytes(Path(data).read_bytes().replace(b"image\0", b"photo\0", 1))
    found, expected = result.predict(renamed), result.predict(data)
    assert [row["probabilities"] for row in found] == [row["probabilities"] for row in expected]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables(run: tuple[FitResult, Path, str], folder: Path, tmp_path: Path, suffix: str) -> None:
    """With a damaged image between whole ones; without `skip`, nothing is written."""
    result, runs, _ = run
    images = [tmp_path / name for name in ("a.jpg", "b.jpg", "c.jpg")]
    for path, source in zip(images, sorted(folder.glob("*/*.jpg")), strict=False):
        shutil.copy(source, path)
    images[1].write_bytes(images[1].read_bytes()[:200])
    out = tmp_path / f"p{suffix}"
    with pytest.raises(DataError, match=r"b.jpg cannot be read.*on_error='skip'"):
        result.predict(tmp_path, out=out)
    assert sorted(tmp_path.iterdir()) == images
    end = call("predict", str(runs), str(tmp_path), "--out", str(out), "--on-error", "skip")
    assert (end.code, end.out) == (0, f"{out}: 3 images, 1 of them damaged\n"), end.err
    expected = result.predict(tmp_path, on_error="skip")
    if suffix == ".csv":
        with out.open(newline="", encoding="utf-8") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
    else:
        rows = parquet.read_table(out).to_pylist()
    shares = {f"probabilities.{name}" for name in CLASSES}
    assert set(rows[0]) == {"image", "class", "probability", "error"} | shares
    for row, want in zip(rows, expected, strict=True):
        assert (row["image"], row["error"] or "") == (want["image"], want.get("error", ""))
        if "class" in want:
            assert row["class"] == want["class"]
            assert float(row["probabilities.cat"]) == want["probabilities"]["cat"]
    with pytest.raises(DataError, match="must end in"):
        result.predict(tmp_path, out=tmp_path / "folder")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_names_that_are_not_utf8_are_in_tables(
    run: tuple[FitResult, Path, str], folder: Path, tmp_path: Path, suffix: str
) -> None:
    """Also in the error of a damaged image."""
    names = [os.fsdecode(name) for name in (b"caf\xe9.jpg", b"t\xeate.jpg")]
    shutil.copy(folder / "bird" / "00.jpg", tmp_path / names[0])
    (tmp_path / names[1]).write_bytes((folder / "bird" / "00.jpg").read_bytes()[:200])
    out = tmp_path / f"p{suffix}"
    rows = run[0].predict([tmp_path / name for name in names], out=out, on_error="skip")
    assert [row["image"] for row in rows] == [str(tmp_path / name) for name in names]
    if suffix == ".csv":
        with out.open(newline="", encoding="utf-8") as file:
            read: list[dict[str, Any]] = list(csv.DictReader(file))
    else:
        read = parquet.read_table(out).to_pylist()
    assert [row["image"] for row in read] == [f"{tmp_path}/caf\ufffd.jpg", f"{tmp_path}/t\ufffdte.jpg"]
    assert "t\ufffdte.jpg cannot be read" in read[1]["error"]


def test_a_table_without_a_place_is_refused_before_anything_is_predicted(
    run: tuple[FitResult, Path, str], tmp_path: Path
) -> None:
    (tmp_path / "0.jpg").write_bytes(b"damaged: predicting would raise this first")
    (tmp_path / "a.csv").mkdir()
    for out, words in (("gone/a.csv", f"The folder {tmp_path}/gone does not exist"), ("a.csv", "a.csv is a folder")):
        with pytest.raises(DataError, match=rf"{words}\. Pass the name of a file in a folder that exists"):
            run[0].predict(tmp_path / "0.jpg", out=tmp_path / out)


def test_bad_images_are_named(run: tuple[FitResult, Path, str], tmp_path: Path) -> None:
    result = run[0]
    half = tmp_path / "half.jpg"
    half.write_bytes(jpeg_bytes(picture(0, 40, 40))[:300])
    for images, words in (
        (half, "half.jpg cannot be read as an image"),
        (torch.zeros(3, 8, 8), "its pixels are float32"),
        (3, "not a int"),
        ([None], "not a NoneType"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(DataError, match=words):
            result.predict(images)
    with pytest.raises(DataError, match=r"^Image 1 of those given: .*its pixels are float32.*on_error='skip'"):
        result.predict([picture(0, 40, 40), torch.zeros(3, 8, 8)])


def labels_of(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = (pixels.mean((1, 2)) > 127).astype(np.float32)
    return found


def test_rows_of_other_tasks(tmp_path: Path) -> None:
    pixels = np.stack([picture(seed, 16, 16) for seed in range(16)])
    for task, targets, width in (
        (MultiLabel(), labels_of(pixels), 3),
        (Regression(), pixels.mean((1, 2, 3)).astype(np.float32), 1),
    ):
        path = tmp_path / f"{task}.beton"
        convert((pixels, targets), path, progress=False)
        pipeline = Pipeline(Outputs, num_classes=width).load(path, batch_size=8, image_size=16, workers=1).task(task)
        (row,) = pipeline.fit(epochs=1, progress=False).predict(pixels[0])
        if width == 3:
            chosen = [name for name, p in row["probabilities"].items() if p >= 0.5]
            assert row == {"image": 0, "labels": chosen, "probabilities": row["probabilities"]}
            assert list(row["probabilities"]) == ["0", "1", "2"]
        else:
            assert isinstance(row["value"], float)
        json.dumps(row)


def test_numbers_of_pixels_are_not_drawn_as_classes() -> None:
    """As a custom task predicts them, such as depths."""
    rows, pixels = Predictions(), picture(0, 16, 16)
    depths = Predicted("a.png", torch.linspace(0, 9, 256).view(16, 16), (16, 16), pixels=pixels)
    rows.add(depths, {"image": "a.png"})
    assert rows._repr_html_() == gallery([((pixels,), "a.png")])


SHAPES = [(60, 80), (80, 60), (64, 64), (40, 90), (20, 17), (1, 70)]
MEAN = (0.5, 0.4, 0.3)
Ran = tuple[FitResult, Path, str]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """JPEGs of two classes, of several shapes."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(12):
        folder = root / "pictures" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.jpg").write_bytes(jpeg_bytes(picture(number, *SHAPES[number % len(SHAPES)])))
    convert(root / "pictures", root / "data.beton", progress=False)
    return str(root / "data.beton")


@pytest.fixture(scope="module", params=["whole", "fit"])
def crops(request: pytest.FixtureRequest, data: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
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


def evaluated_crops(crops: Ran) -> tuple[torch.Tensor, torch.Tensor]:
    """The images as FFCVLoader evaluates them, and the model's outputs."""
    result, _, data = crops
    options = {"eval_crop": result.inputs.eval_crop, "interpolation": "nearest", "mean": MEAN}
    with FFCVLoader(data, batch_size=12, image_size=(24, 32), train=False, workers=1, **options) as loader:
        ((images, _),) = loader
    result.model.eval()
    with torch.no_grad():
        return images, result.model(images)


def test_predictions_take_the_loaders_pixels(crops: Ran) -> None:
    result, folder, data = crops
    images, outputs = evaluated_crops(crops)
    own = torch.stack([result.preprocess(image) for image in originals(data)])
    assert own.shape == (12, 3, 24, 32)
    assert torch.equal(own, images)
    center = dataclasses.replace(result.inputs, eval_crop="center").transform()
    assert (torch.stack([center(image) for image in originals(data)]) - images).abs().max() > 0.5
    for rows in (result.predict(originals(data)), load_run(folder).predict(originals(data))):
        found = torch.tensor([[row["probabilities"][name] for name in "ab"] for row in rows])
        torch.testing.assert_close(found, outputs.softmax(1), rtol=0, atol=1e-5)


def test_its_files_have_the_crop(crops: Ran, tmp_path: Path) -> None:
    result, folder, _ = crops
    crop = result.inputs.eval_crop
    assert read_recipe(folder / "recipe.yaml")[0]["trained"]["eval_crop"] == crop
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["inputs"])["eval_crop"] == crop
    export(folder, tmp_path / "own.safetensors")
    with safe_open(tmp_path / "own.safetensors", framework="pt") as file:
        assert Inputs.from_dict(json.loads(file.metadata()["inputs"])) == result.inputs
    text = (tmp_path / CARD).read_text()
    known = {
        "whole": "resized to 24 × 32 pixels (nearest)",
        "fit": "scaled to fit into 24 × 32 pixels (nearest), with its aspect ratio, and centered on the color "
        "(128, 102, 76)",
    }
    assert f"RGB. Each full picture, {known[crop]}, scaled to 0–1, minus the mean (0.5" in text
    assert "central" not in text


@pytest.mark.long
@pytest.mark.parametrize("name", ["own.pt2", pytest.param("own.onnx", marks=pytest.mark.slow)])
def test_a_program_is_compared_on_these_pixels(crops: Ran, name: str, tmp_path: Path) -> None:
    _, folder, _ = crops
    exported = export(folder, tmp_path / name)
    assert exported.difference is not None
    assert exported.difference.images == "8 images of data.beton"
    largest = float(evaluated_crops(crops)[1][:8].abs().max())
    assert exported.difference.scale == pytest.approx(largest, rel=1e-4)


def test_the_preprocessing_is_shown(crops: Ran) -> None:
    inputs, shown = crops[0].inputs, repr(crops[0].preprocess)
    assert f"24 × 32, eval_crop='{inputs.eval_crop}', interpolation='nearest'" in shown


def test_a_model_in_training_mode_is_evaluated_as_it_is(toy: Toy, tmp_path: Path) -> None:
    """Its number of classes, which data without names does not have, is asked for with an image."""
    bare = str(write_toy(tmp_path / "bare.beton", TRAIN, seed=1, classes=None))
    pipeline = toy.pipeline(batch_norm_model).load(bare, bare, batch_size=BATCH, image_size=SIDE, workers=1)
    result = pipeline.fit(epochs=1, progress=False)
    before = {name: value.clone() for name, value in result.model.state_dict().items()}
    result.model.train()
    assert result.evaluate() == pytest.approx(result.metrics)
    assert result.model.training
    torch.testing.assert_close(result.model.state_dict(), before, rtol=0, atol=0)
