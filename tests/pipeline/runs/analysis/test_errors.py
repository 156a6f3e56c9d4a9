"""What a model gets wrong: the same numbers as computed by hand from its predictions, alone and on two ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_jobs as jobs
import torch
import torch.nn.functional as F
import yaml
from command_line import call, done_under_torchrun
from drivetrain import DataError, MultiLabel, Pipeline, PlanError, Segmentation, Task
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.pipeline import load_run
from drivetrain.pipeline.runs.analysis.batch import ShownBatch
from drivetrain.pipeline.runs.analysis.errors import (
    Calibration,
    ClassErrors,
    Errors,
    LabelErrors,
    PixelErrors,
    ValueErrors,
    wilson,
)
from drivetrain.pipeline.runs.result import _on_one_device
from drivetrain.strategies import launch
from drivetrain.transforms import TestTimeFlip
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pipeline_data import SIDE, VAL, Toy, toy_arrays
from torch import nn


def validation(file: str, side: int = SIDE) -> tuple[torch.Tensor, torch.Tensor]:
    with FFCVLoader(file, batch_size=VAL, image_size=side, train=False, workers=1) as loader:
        batches = list(loader)
    return torch.cat([images for images, _ in batches]), torch.cat([targets for _, targets in batches])


def same(one: Any, other: Any) -> None:
    """Two results of the same data have the same values."""
    assert type(one) is type(other)
    for name, value in vars(one).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(value, getattr(other, name), rtol=1e-5, atol=1e-6)
    assert one.metrics == pytest.approx(other.metrics, abs=1e-6)
    assert one.pictures.keys() == other.pictures.keys()
    for sample, pictures in one.pictures.items():
        for name, picture in pictures.items():
            assert (picture == other.pictures[sample][name]).all()


def test_classes_are_judged_as_by_hand(toy: Toy, tmp_path: Path) -> None:
    result = toy.pipeline().fit(epochs=2, progress=False)
    errors = result.errors()
    assert isinstance(errors, ClassErrors)
    images, labels = validation(toy.val)
    with torch.no_grad():
        logits = result.model(images)
    losses = F.cross_entropy(logits, labels, reduction="none")
    probabilities, predictions = logits.softmax(1).max(1)
    np.testing.assert_allclose(errors.losses, losses, atol=1e-5)
    assert errors.samples.tolist() == [*range(VAL)]
    assert errors.targets.tolist() == labels.tolist()
    assert errors.predictions.tolist() == predictions.tolist()
    np.testing.assert_allclose(errors.probabilities, probabilities, atol=1e-5)
    for truth, said in np.ndindex(4, 4):
        assert errors.confusion[truth, said] == ((labels == truth) & (predictions == said)).sum()
    assert errors.metrics == pytest.approx(result.metrics, abs=1e-6)
    assert errors.worst(5).tolist() == losses.argsort(descending=True, stable=True)[:5].tolist()
    assert errors.least_certain(5).tolist() == probabilities.argsort(stable=True)[:5].tolist()
    assert {int(errors.samples[at]) for at in errors.worst()} <= errors.pictures.keys()
    worst = int(errors.worst()[0])
    off = errors.pictures[worst]["image"].astype(int) - np.asarray(_stored(toy.val, worst))
    assert np.abs(off).max() <= 1  # the normalization is undone
    same(
        errors,
        replace(result, spec=toy.pipeline().distribute("ddp", devices=2, device="cpu")).errors(),
    )
    for name in ("e.png", "e.svg", "e.json"):
        assert errors.save(tmp_path / name).stat().st_size > 1000
    first, row = json.loads((tmp_path / "e.json").read_text())["table"][0], errors.rows()[0]
    assert [*first.values()] == list(row)
    assert (first["class"], first["precision 95 %"], first["recall 95 %"]) == ("a", row[3], row[5])
    with Image.open(tmp_path / "e.png") as drawn:
        assert drawn.size[0] == 1100
    with pytest.raises(DataError, match=r"e\.txt must end in \.json, \.png"):
        errors.save(tmp_path / "e.txt")


def _stored(file: str, sample: int) -> Any:
    with FFCVLoader(
        file, batch_size=1, image_size=SIDE, train=False, indices=[sample], workers=1, dtype=torch.uint8
    ) as loader:
        ((images, _),) = loader
    return images[0].permute(1, 2, 0)


def test_the_table_has_precision_recall_and_their_intervals(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")  # a narrower terminal lists only what a class has
    errors = toy.pipeline().fit(epochs=1, progress=False).errors()
    assert isinstance(errors, ClassErrors)
    for k, row in enumerate(errors.to_dict()["table"]):
        there, said, right = errors.confusion[k].sum(), errors.confusion[:, k].sum(), errors.confusion[k, k]
        assert row["samples"] == str(there)
        assert row["recall"] == f"{right / there:.1%}"
        assert row["precision"] == (f"{right / said:.1%}" if said else "–")
        assert row["F1"] == f"{2 * right / (there + said):.3f}"
    assert "mistaken for" in str(errors)
    assert errors._repr_html_().startswith("<table>")
    assert len(errors.table(2).rows) == 2
    assert errors.table(2).caption == "The 2 lowest of 4."


@given(st.integers(0, 60), st.integers(0, 60))
def test_an_interval_holds_its_share(successes: int, failures: int) -> None:
    low, high = wilson(successes, successes + failures)
    assert 0 <= low <= successes / max(successes + failures, 1) <= high <= 1
    if successes + failures:  # where the distance from the share is 1.96 standard errors of the end itself
        for end in (low, high):
            if 0 < end < 1:
                error = (end * (1 - end) / (successes + failures)) ** 0.5
                assert abs(end - successes / (successes + failures)) == pytest.approx(1.959964 * error, rel=1e-4)


def test_calibration_of_perfect_and_of_overconfident_predictions() -> None:
    sure = np.full(100, 0.9, np.float32)
    assert Calibration.of(sure, np.arange(100) < 90).error == pytest.approx(0, abs=1e-6)
    assert Calibration.of(sure, np.arange(100) < 40).error == pytest.approx(0.5, abs=1e-6)
    assert Calibration.of(np.ones(3, np.float32), np.ones(3, np.bool_)).samples.sum() == 3


def test_calibration_has_fifteen_bins_of_equal_width() -> None:
    edges, right = np.arange(1, 15) / 15, np.arange(14) % 2 == 0
    for probabilities, own in ((edges - 1e-4, slice(14)), (edges + 1e-4, slice(1, 15))):  # below and above each edge
        found = Calibration.of(probabilities.astype(np.float32), right)
        np.testing.assert_allclose(found.probability[own], probabilities, rtol=1e-6)
        assert found.right[own].tolist() == right.tolist()
        assert found.samples[own].tolist() == [1] * 14
        assert (len(found.samples), found.samples.sum()) == (15, 14)
    ends = Calibration.of(np.array([0, 1], np.float32), np.array([False, True]))
    assert ends.samples.tolist() == [1, *[0] * 13, 1]
    # A bin of three, 1 / 6 from its share of 1 / 3, and one of a single prediction, 0.1 from 1.
    several = np.array([0.5, 0.5, 0.5, 0.9], np.float32)
    assert Calibration.of(several, np.arange(4) % 3 == 0).error == pytest.approx((3 / 6 + 0.1) / 4, abs=1e-6)


def test_thousands_of_classes() -> None:
    random, n, classes = np.random.default_rng(0), 2_000, 2_000
    targets = random.integers(0, classes, n)
    predictions = np.where(random.random(n) < 0.5, targets, random.integers(0, classes, n))
    errors = ClassErrors(
        "x", {}, tuple(map(str, range(classes))), np.arange(n), np.zeros(n, np.float32), pictures={},
        targets=targets, predictions=predictions, probabilities=np.full(n, 0.5, np.float32),
    )  # fmt: skip
    assert errors.confusion.shape == (classes, classes)
    assert errors.confusion.sum() == n
    assert len(errors.table().rows) == 20
    assert errors.show().axes


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """Between two `$`, matplotlib would draw mathematics, or fail; its legends leave out what begins with "_"."""
    names, samples = ("_a", "$_$", "$5"), np.arange(3)
    pictures = {n: {"image": np.zeros((8, 8, 3), np.uint8)} for n in range(3)}
    common: dict[str, Any] = {"pictures": pictures, "targets": samples, "probabilities": np.ones(3, np.float32)}
    classes = ClassErrors("$_$", {}, names, samples, np.ones(3, np.float32), predictions=samples[::-1], **common)
    common |= {"targets": np.eye(3) > 0, "probabilities": np.full((3, 3), 0.5, np.float32)}
    labels = LabelErrors("x", {}, names, samples, np.ones(3, np.float32), **common)
    mask = np.resize(samples, (8, 8))
    batch = ShownBatch("x", tuple((each["image"],) for each in pictures.values()), names, (mask,) * 3, names)
    drawn: tuple[Any, ...] = classes, labels, batch
    for number, each in enumerate(drawn):
        assert each.save(tmp_path / f"{number}.png").stat().st_size > 1000
    legend = labels.show().subfigs[0].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["_a 0.33", r"\$_\$ 0.33", r"\$5 0.33"]


def test_values_are_judged_as_by_hand(tmp_path: Path) -> None:
    train, val = jobs.write(tmp_path, jobs.numbers_of)
    pipeline = jobs.pipeline_of("Regression", (train, val))
    result = pipeline.fit(epochs=1, progress=False)
    errors: Any = result.errors()
    images, targets = validation(val, jobs.SIDE)
    with torch.no_grad():
        values = result.model(images)[:, 0]
    np.testing.assert_allclose(errors.residuals[:, 0], values - targets, atol=1e-5)
    spread = ((targets - targets.mean()) ** 2).sum()
    assert errors.scores()[0] == pytest.approx((1 - ((values - targets) ** 2).sum() / spread).item(), abs=1e-4)
    assert errors.metrics["mae"] == pytest.approx(np.abs(errors.residuals).mean(), abs=1e-5)
    assert errors.show().axes
    assert str(errors).count("│") >= 7


def test_labels_are_judged_as_by_hand(tmp_path: Path) -> None:
    train, val = jobs.write(tmp_path, jobs.vectors)
    result = (
        Pipeline(jobs.Outputs, num_classes=3).load(train, val, batch_size=32, image_size=jobs.SIDE, workers=1)
        .task(MultiLabel()).optimize("sgd", lr=0.1).fit(epochs=2, progress=False)
    )  # fmt: skip
    errors: Any = result.errors()
    ap = [errors.average_precision(label) for label in range(3)]
    assert np.nanmean(ap) == pytest.approx(result.metrics["map"], abs=1e-4)
    images, targets = validation(val, jobs.SIDE)
    with torch.no_grad():
        probabilities = result.model(images).sigmoid()
    np.testing.assert_allclose(errors.probabilities, probabilities, atol=1e-5)
    assert (errors.targets == targets.bool().numpy()).all()
    precision, recall, thresholds = errors.curve(0)
    for at in (0, len(thresholds) // 2, -1):
        said = errors.probabilities[:, 0] >= thresholds[at]
        assert precision[at] == pytest.approx((said & errors.targets[:, 0]).sum() / said.sum())
        assert recall[at] == pytest.approx((said & errors.targets[:, 0]).sum() / errors.targets[:, 0].sum())
    assert errors.show().axes


class Pixels(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 3, 3, padding=1)


def test_pixels_are_judged_as_by_hand(tmp_path: Path) -> None:
    files = []
    for name, count, seed in (("train", 32, 0), ("val", 9, 1)):
        images = jobs.images(count, seed)
        masks = [np.where(image[..., 0] > 127, 1, 0).astype(np.uint8) for image in images]
        for mask in masks:
            mask[:2] = 255
        convert([*zip(images, masks, strict=True)], tmp_path / f"{name}.beton", progress=False)
        files.append(str(tmp_path / f"{name}.beton"))
    pipeline = (
        Pipeline(Pixels).load(*files, batch_size=8, image_size=jobs.SIDE, workers=1, eval_ratio=1.0)
        .task(Segmentation(classes=3)).optimize("sgd", lr=0.1)
    )  # fmt: skip
    result = pipeline.fit(epochs=1, progress=False)
    errors: Any = result.errors()
    with FFCVLoader(files[1], batch_size=9, image_size=jobs.SIDE, train=False, workers=1, eval_ratio=1.0) as loader:
        ((images, masks),) = loader
    with torch.no_grad():
        predictions = result.model(images).argmax(1)
    for truth, said in np.ndindex(3, 3):
        assert errors.confusion[truth, said] == ((masks == truth) & (predictions == said)).sum()
    assert errors.counted.tolist() == [(mask != 255).sum().item() for mask in masks]
    assert errors.right.sum() / errors.counted.sum() == pytest.approx(result.metrics["pixel_accuracy"], abs=1e-6)
    worst = int(errors.worst()[0])
    assert (errors.pictures[worst]["prediction"] == predictions[worst].numpy()).all()
    assert errors.show().axes
    same(
        errors,
        replace(result, spec=pipeline.distribute("ddp", devices=2, device="cpu")).errors(),
    )


def test_a_sample_that_does_not_count_has_no_loss(tmp_path: Path) -> None:
    """Such as a mask of void pixels only, of which a weighted mean would be 0 / 0."""
    images = jobs.images(16, 0)
    masks = [np.where(image[..., 0] > 127, 1, 0).astype(np.uint8) for image in images]
    masks[5][:] = 255
    convert([*zip(images, masks, strict=True)], tmp_path / "data.beton", progress=False)
    file = str(tmp_path / "data.beton")
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0]), ignore_index=255)
    pipeline = (
        Pipeline(Pixels).load(file, file, batch_size=8, image_size=jobs.SIDE, workers=1, eval_ratio=1.0)
        .task(Segmentation(classes=3, loss=loss)).optimize("sgd", lr=0.1)
    )  # fmt: skip
    errors = pipeline.fit(epochs=1, progress=False).errors()
    assert errors.losses[5] == 0
    assert (np.delete(errors.losses, 5) > 0).all()
    assert errors.worst(16)[-1] == 5
    assert 5 not in [each["sample"] for each in errors.to_dict()["worst"][:15]]


def test_losses_that_are_not_finite_are_null_in_json(toy: Toy, tmp_path: Path) -> None:
    errors = toy.pipeline().fit(epochs=1, progress=False).errors()
    errors.losses[3] = np.nan
    text = errors.save(tmp_path / "errors.json").read_text()
    worst = json.loads(text, parse_constant=pytest.fail)["worst"][0]
    assert (worst["sample"], worst["loss"]) == (3, None)


def test_a_task_of_ones_own_has_its_losses(tmp_path: Path) -> None:
    files = jobs.write(tmp_path, jobs.TASKS["your own"][1])
    result = jobs.pipeline_of("your own", files).fit(epochs=1, progress=False)
    errors = result.errors()
    assert type(errors) is Errors
    assert errors.losses.mean() == pytest.approx(result.metrics["val_loss"], abs=1e-5)
    assert errors.show().axes
    assert "samples" in str(errors)


def test_the_weights_that_the_run_evaluates_are_judged(toy: Toy) -> None:
    """With flips at test time, as in the run's evaluation."""
    result = toy.pipeline().transform(TestTimeFlip()).fit(epochs=1, progress=False)
    errors = result.errors()
    assert errors.metrics == pytest.approx(result.metrics, abs=1e-6)
    assert errors.losses.mean() == pytest.approx(result.metrics["val_loss"], abs=1e-5)


def test_other_data_and_none(toy: Toy) -> None:
    result = toy.pipeline().fit(epochs=1, progress=False)
    assert len(result.errors(toy.train)) == 128
    without = toy.named().load(toy.train, batch_size=32, image_size=SIDE)
    with pytest.raises(PlanError, match=r"no validation data.*errors\('val\.beton'\) \(--data\)"):
        replace(result, spec=without).errors()


@pytest.mark.parametrize("names", [["a", "b", "c", "d"], None])
def test_a_loaded_run_needs_neither_the_training_data_nor_its_devices(tmp_path: Path, names: list[str] | None) -> None:
    """As on a laptop, to which the folder was copied from a cluster."""
    files = [str(tmp_path / f"{name}.beton") for name in ("train", "val", "fewer", "other")]
    out = tmp_path / "run"
    images, labels = toy_arrays(64, 0, SIDE)
    for file, count in zip(files, (64, 24, 20, 20), strict=True):
        own = np.minimum(labels[:count], 2) if count == 20 else labels[:count]
        other = ["x", *"bcd"] if file == files[3] else names
        convert((images[:count], own), file, classes=other, progress=False)
    pipeline = Pipeline("cifar_resnet", num_classes=4, width=4)
    pipeline = pipeline.load(*files[:2], batch_size=16, image_size=SIDE, workers=1)
    result = pipeline.optimize("sgd", lr=0.01).fit(epochs=1, out=out, progress=False)
    recipe = out / "recipe.yaml"
    values = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**values, "strategy": "fsdp", "devices": 4, "accumulate": 2, "val": files[1]}))
    Path(files[0]).unlink()
    loaded = load_run(out)
    assert loaded.evaluate() == pytest.approx(result.metrics, abs=1e-5)
    same(loaded.errors(), result.errors())
    assert len(loaded.errors(files[2])) == 20  # without the last class
    if names is not None:
        with pytest.raises(PlanError, match=r"Class 0 is 'a' in the training data and 'x' in .*other\.beton"):
            loaded.errors(files[3])


def test_a_loaded_run_is_evaluated_in_batches_that_one_of_its_devices_has_computed(toy: Toy) -> None:
    """One that has the memory of the run's devices may not be here."""
    half = toy.pipeline().distribute("fsdp", devices=4, device="cpu", accumulate=2, precision="bf16")
    for batch_size, expected in ((64, 8), (8, 1)):
        pipeline = half.load(toy.train, toy.val, batch_size=batch_size, image_size=SIDE)
        assert pipeline.data is not None
        one = _on_one_device(pipeline, pipeline.data)
        assert one.data is not None
        assert one.data.batch_size == expected
        how = one.distributed
        assert (how.devices, how.accumulate, how.device, how.precision) == (1, 1, "cpu", "bf16")


def test_the_command(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.named().fit(epochs=1, out=tmp_path / "run", progress=False)
    monkeypatch.chdir(tmp_path)
    end = call("errors", "run", "--out", "e.png")
    assert (end.code, end.err) == (0, "")
    assert "precision" in end.out
    assert Path("e.png").exists()
    assert json.loads(call("errors", "run", "--data", toy.train, "--json").out)["samples"] == 128


@pytest.mark.process
def test_of_several_ranks_one_prints(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.named().distribute("ddp", device="cpu", devices=2)
    pipeline.fit(epochs=1, out=tmp_path / "run", progress=False, checkpoints=None)
    command = ("errors", f"{tmp_path / 'run'}", "--json")
    first, second = launch(done_under_torchrun, *command, devices=2, device="cpu", timeout=120)
    assert (json.loads(first)["samples"], second) == (VAL, "")


class Declared(Task):
    """Has class indices, which it must declare for MixUp; what it predicts is its own."""

    kind = "class indices"

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs["logits"] if isinstance(outputs, dict) else outputs, targets)


@pytest.mark.parametrize("container", ["tensor", "dict"])
def test_a_task_of_ones_own_that_declares_its_targets_has_its_losses(tmp_path: Path, container: str) -> None:
    files = jobs.write(tmp_path, lambda pictures: pictures.mean((1, 2)).argmax(1))
    pipeline = Pipeline(jobs.Outputs, num_classes=3, container=container).task(Declared())
    pipeline = pipeline.load(*files, batch_size=32, image_size=jobs.SIDE, flip=False, workers=1)
    errors = pipeline.fit(epochs=1, progress=False).errors()
    assert type(errors) is Errors
    assert errors.losses.mean() == pytest.approx(errors.metrics["val_loss"], abs=1e-5)


class Shared(jobs.Outputs):
    """Returns, with the logits, a number and weights that all images have in common."""

    def forward(self, images: torch.Tensor) -> Any:
        weight = self.head.weight.detach()
        return {"logits": super().forward(images), "weight": weight, "size": weight.square().mean()}


class Penalized(Task):
    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        penalty = outputs["size"] + outputs["weight"].abs().mean()
        return F.cross_entropy(outputs["logits"], targets) + 0.1 * penalty


def test_outputs_that_all_samples_share_belong_to_each_loss(tmp_path: Path) -> None:
    files = jobs.write(tmp_path, lambda pictures: pictures.mean((1, 2)).argmax(1))
    pipeline = Pipeline(Shared, num_classes=3).task(Penalized())
    pipeline = pipeline.load(*files, batch_size=32, image_size=jobs.SIDE, flip=False, workers=1)
    errors = pipeline.fit(epochs=1, progress=False).errors()
    assert errors.losses.mean() == pytest.approx(errors.metrics["val_loss"], abs=1e-5)


class Named(Declared):
    """Has arguments of the names that the tasks of Drivetrain have for other things."""

    def __init__(self, scale: float = 2.0, classes: tuple[str, ...] = ("red", "green", "blue")) -> None:
        self.scale, self.classes = scale, classes


def test_a_task_of_ones_own_may_name_its_arguments_as_it_likes(tmp_path: Path) -> None:
    files = jobs.write(tmp_path, lambda pictures: pictures.mean((1, 2)).argmax(1))
    pipeline = Pipeline(jobs.Outputs, num_classes=3).task(Named())
    pipeline = pipeline.load(*files, batch_size=32, image_size=jobs.SIDE, flip=False, workers=1)
    errors = pipeline.fit(epochs=1, progress=False).errors()
    assert errors.classes == ("0", "1", "2")


def test_a_class_without_samples_and_predictions_has_no_f1() -> None:
    at, common = np.arange(2), {"pictures": {}, "probabilities": np.ones(2, np.float32)}
    errors = ClassErrors("x", {}, (*"abc",), at, np.ones(2, np.float32), targets=at, predictions=at, **common)
    assert [row[6] for row in errors.rows()] == ["1.000", "1.000", "–"]
    common["probabilities"] = (found := np.eye(2, 3)).astype(np.float32)
    labels = LabelErrors("x", {}, (*"abc",), at, np.ones(2, np.float32), targets=found > 0, **common)
    assert [row[6] for row in labels.rows()] == ["1.000", "1.000", "–"]


def test_the_curve_of_a_label_has_the_area_of_its_average_precision() -> None:
    targets, shares = np.array([[1], [0], [1], [1], [0]]) > 0, np.linspace(0.9, 0.5, 5, dtype=np.float32)[:, None]
    common: dict[str, Any] = {"pictures": {}, "targets": targets, "probabilities": shares}
    errors = LabelErrors("x", {}, ("a",), np.arange(5), np.ones(5, np.float32), **common)
    (line,) = errors.show().subfigs[0].axes[0].lines
    recall, precision = line.get_data()
    assert line.get_drawstyle() == "steps-pre"
    assert (recall[0], recall[-1]) == (0, 1)
    assert np.diff(recall) @ precision[1:] == pytest.approx(errors.average_precision(0))
    assert errors.average_precision(0) == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)


def test_the_figures_of_labels_values_and_pixels_are_those_by_hand() -> None:
    """Each figure of a row is another number, so that none can be in the place of another."""
    given: Any = ("x", {}, ("a",), np.arange(4), np.ones(4, np.float32))
    shares = np.array([[0.9], [0.4], [0.3], [0.6]], np.float32)
    labels = LabelErrors(*given, pictures={}, targets=np.array([[1], [1], [1], [0]]) > 0, probabilities=shares)
    (row,) = labels.rows()
    assert (row[1], row[2], row[4], row[6]) == ("3", "50.0%", "33.3%", "0.400")
    targets, found = np.array([[0.0], [2.0], [4.0], [6.0]]), np.array([[-2.0], [2.0], [4.0], [7.0]])
    values = ValueErrors(*given, pictures={}, targets=targets, values=found)
    assert values.rows() == [("a", "3", "2.236", "-0.25", "0.75", "1.85", "0.750")]
    pixels = PixelErrors(
        "x", {}, ("a", "b"), np.arange(1), np.ones(1, np.float32), pictures={}, confusion=np.array([[3, 1], [0, 4]]),
        right=np.array([7]), counted=np.array([8]),
    )  # fmt: skip
    assert pixels.rows() == [
        ("a", "50.0%", "100.0%", "75.0%", "0.750", "b 25.0%"), ("b", "50.0%", "80.0%", "100.0%", "0.800", ""),
    ]  # fmt: skip


def test_a_picture_of_four_values_names_the_number_of_all() -> None:
    found, samples = np.eye(3, 6), np.arange(3)
    for names, title in (("abcdef", "the first 4 of 6 values"), ("abcd", "")):
        own: dict[str, Any] = {"targets": found[:, : len(names)], "values": found[:, : len(names)] + 0.1}
        errors = ValueErrors("x", {}, (*names,), samples, np.ones(3, np.float32), pictures={}, **own)
        overview = errors.show().subfigs[0]
        assert overview.get_suptitle() == title
        assert [axes.get_title("left") for axes in overview.axes] == [*"abcd"]
