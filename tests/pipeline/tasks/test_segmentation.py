"""Segmentation from a `.beton` with masks: trained, judged as by hand, on ranks, resumed, predicted, and refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import Classification, DataError, Pipeline, PlanError, Segmentation
from drivetrain.common.errors import BetonError
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, open_beton
from drivetrain.pipeline import load_run
from drivetrain.strategies import launch
from drivetrain.transforms import CutOut, MixUp, ProgressiveResizing, RandAugment, TestTimeFlip
from PIL import Image
from same_runs import assert_same_weights
from segmentation_jobs import SIDE, VAL, Files, Net, history, on_two_ranks, pipeline_of, scene, write
from torch import nn
from torch.nn import functional as F


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write(tmp_path_factory.mktemp("segmentation"))


def test_it_learns_and_is_judged_as_by_hand(files: Files, tmp_path: Path) -> None:
    result = pipeline_of(files).fit(epochs=6, out=tmp_path, progress=False)
    last = result.history.epochs[-1]
    assert last.metrics["miou"] > 0.6
    assert result.history.epochs[0].metrics["miou"] < last.metrics["miou"]
    with FFCVLoader(files[1], batch_size=VAL, image_size=SIDE, train=False, workers=1) as loader:
        ((images, masks),) = loader
    assert masks.shape == (VAL, SIDE, SIDE)
    with torch.no_grad():
        predicted = result.model.eval()(images)["out"].argmax(1)
    counted = masks != 255
    assert 0 < counted.float().mean() < 1
    assert last.metrics["pixel_accuracy"] == pytest.approx(
        (predicted == masks)[counted].float().mean().item(), abs=1e-5
    )
    ratios = []
    for label in range(3):
        ours, theirs = (predicted == label) & counted, masks == label
        ratios.append(((ours & theirs).sum() / (ours | theirs).sum()).item())
    assert last.metrics["miou"] == pytest.approx(np.mean(ratios), abs=1e-5)
    saved = json.loads((tmp_path / "history.json").read_text())
    assert saved["monitor"]["name"] == "miou"


@pytest.mark.process
@pytest.mark.timeout(150)
@pytest.mark.usefixtures("one_thread")
def test_it_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    """Every pixel counts here: with some that do not, each rank takes the mean over its own."""
    paths = []
    for name, number in (("train", 64), ("val", 21)):
        scenes = [scene(seed) for seed in range(number)]
        pairs = [(image, np.where(mask == 255, 0, mask)) for image, mask in scenes]
        convert(pairs, tmp_path / f"{name}.beton", progress=False)
        paths.append(str(tmp_path / f"{name}.beton"))
    both = paths[0], paths[1]
    alone = history(both)
    for strategy, found in launch(on_two_ranks, both, devices=2)[0].items():
        for one, other in zip(alone, found, strict=True):
            assert other[:2] == pytest.approx(one[:2], abs=5e-6), strategy
            # A pixel or two are between two classes.
            assert other[2:] == pytest.approx(one[2:], abs=1e-3), strategy


def test_it_resumes_bit_for_bit(files: Files, tmp_path: Path) -> None:
    pipeline = pipeline_of(files).optimize("sgd", lr=0.3, schedule="constant")
    whole = pipeline.fit(epochs=3, progress=False)
    pipeline.fit(epochs=1, out=tmp_path, progress=False)
    resumed = pipeline.fit(epochs=3, out=tmp_path, progress=False, resume=True)
    assert_same_weights(resumed, whole)


def test_methods_that_keep_the_mask_in_place(files: Files) -> None:
    pipeline = pipeline_of(files).transform(CutOut(), ProgressiveResizing(0.5))
    result = pipeline.fit(epochs=4, progress=False)
    assert np.isfinite(result.metrics["val_loss"])


def test_plain_pytorch_loads_the_same_masks_in_evaluation(files: Files) -> None:
    """Its customary crop of squares is of a resized image; of other shapes, both crop first."""
    shape = (20, 28)
    options = {"batch_size": VAL, "image_size": shape, "train": False}
    with (
        FFCVLoader(files[1], workers=1, **options) as ours,
        TorchLoader(files[1], workers=0, **options) as plain,
    ):
        (images, masks), (others, expected) = next(iter(ours)), next(iter(plain))
    assert torch.equal(masks, expected)
    assert type(expected) is torch.Tensor
    assert (images - others).abs().max() < 0.1


@pytest.mark.parametrize(
    "options",
    [
        {}, {"crop": "random"}, {"crop": "whole"}, {"crop": "fit"}, {"flip": "alternating"}, {"train": False},
        {"train": False, "eval_crop": "fit"}, {"color_jitter": (0.2, 0.2, 0.2), "cutout": 6},
    ],
    ids=str,
)  # fmt: skip
def test_masks_of_plain_pytorch_follow_the_image(options: dict[str, Any], tmp_path: Path) -> None:
    """The images show their masks, so that a mask that stays behind is seen."""
    pairs = []
    for seed in range(8):
        shown = np.zeros((30 + seed, 40 - seed), np.uint8)
        shown[5:25, 3 : 12 + seed] = 1
        pairs.append((np.repeat(shown[:, :, None] * 200, 3, 2), shown))
    convert(pairs, tmp_path / "a.beton", progress=False)
    given = {"batch_size": 8, "image_size": 22, "dtype": torch.uint8, "interpolation": "nearest", **options}
    agree = []
    for kind, workers in ((FFCVLoader, 2), (TorchLoader, 0)):
        with kind(tmp_path / "a.beton", workers=workers, **given) as loader:
            for _ in range(2):
                images, masks = next(iter(loader))
                inside = masks != 255
                bright = images.float().mean(1)[inside] > 80
                agree.append((bright == (masks[inside] == 1)).float().mean().item())
    assert min(agree) > (0.85 if "cutout" in options else 0.94)


def test_the_ledgers_baseline_trains_on_masks(files: Files) -> None:
    pipeline = pipeline_of(files).load(
        *files, batch_size=16, image_size=SIDE, workers=0, loader="torch", scale=(0.5, 1.0)
    )
    assert pipeline.fit(epochs=2, progress=False).metrics["miou"] > 0.2


def test_a_recipe_a_run_and_its_predictions(files: Files, tmp_path: Path) -> None:
    pipeline = pipeline_of(files)
    recipe = pipeline.replace(epochs=1).to_recipe()
    assert Pipeline.from_recipe(recipe).goal == Segmentation(3)
    pipeline.fit(epochs=4, out=tmp_path / "run", progress=False)
    image, mask = scene(5)
    Image.fromarray(image).save(tmp_path / "scene.png")
    run = load_run(tmp_path / "run")
    (row,) = run.predict(tmp_path / "scene.png")
    assert np.array(row["prediction"]).shape == (SIDE, SIDE)
    assert set(np.unique(row["prediction"])) <= {0, 1, 2}
    assert 1 in mask


def changed(files: Files, **options: Any) -> Pipeline:
    return pipeline_of(files).load(*files, batch_size=16, image_size=SIDE, workers=1, **options)


REFUSED: dict[str, tuple[Any, str]] = {
    "classes": (lambda f: pipeline_of(f).task(Segmentation(2)), "has 3 classes, but the task has classes=2"),
    "another task": (lambda f: pipeline_of(f).task(Classification()), "a mask per image, but Classification"),
    "width": (lambda f: pipeline_of(f).task(Segmentation(4)), r"returns \(2, 3, 24, 24\).*num_classes=4"),
    "resolution": (
        lambda f: pipeline_of(f).replace(model=nn.Conv2d(3, 3, 3, stride=2), model_options={}),
        "returns logits for 11 × 11 pixels of images of 24 × 24",
    ),
    "mixing": (lambda f: pipeline_of(f).transform(MixUp(0.2)), "MixUp needs targets that are"),
    "flips": (lambda f: pipeline_of(f).transform(TestTimeFlip()), "TestTimeFlip needs targets"),
    "a policy": (lambda f: pipeline_of(f).transform(RandAugment()), "do not follow policy"),
    "views": (lambda f: changed(f, views=2), "several images of each sample, but Segmentation has masks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str, files: Files) -> None:
    make, message = REFUSED[name]
    with pytest.raises(Exception, match=message) as raised:
        make(files).fit(epochs=1, progress=False)
    assert type(raised.value).__module__ == "drivetrain.common.errors"


def test_class_indices_without_names_are_looked_at(tmp_path: Path) -> None:
    convert([scene(seed) for seed in range(20)], tmp_path / "a.beton", progress=False)
    path = str(tmp_path / "a.beton")
    pipeline = Pipeline(Net, num_classes=2).task(Segmentation(2)).load(path, batch_size=4, image_size=SIDE)
    with pytest.raises(PlanError, match="has 3 classes, but the task has classes=2"):
        pipeline.fit(epochs=1, progress=False)


def test_a_damaged_mask_can_be_excluded_or_skipped(tmp_path: Path) -> None:
    """Also where masks are looked at before training."""
    path = tmp_path / "a.beton"
    convert([scene(seed) for seed in range(20)], path, progress=False)
    start = int(open_beton(path).columns["label"].pointers[3])
    with path.open("r+b") as file:
        file.seek(start + 60)
        file.write(b"\xff\x00\xff\x00")
    pipeline = Pipeline(Net, num_classes=3).task(Segmentation(3))
    options: dict[str, Any] = {"batch_size": 4, "image_size": SIDE, "workers": 1}
    others = [number for number in range(20) if number != 3]
    cases: list[tuple[dict[str, Any], int]] = [({"indices": others}, 16), ({"on_error": "skip"}, 20)]
    for chosen, count in cases:
        with pipeline.load(str(path), **options, **chosen).build() as built:
            assert sum(len(masks) for _, masks in built.train) == count
    with pytest.raises(BetonError, match=r"sample 3: its mask 'label': its PNG is damaged"):
        pipeline.load(str(path), **options).build()


def test_masks_as_files(files: Files, tmp_path: Path) -> None:
    """Of the pictures' sizes and folders; what the crop leaves out does not count."""
    result = pipeline_of(files).fit(epochs=4, progress=False)
    for n in range(3):
        (tmp_path / "in" / "xyz"[n]).mkdir(parents=True)
        Image.fromarray(scene(1000 + n)[0]).save(tmp_path / "in" / "xyz"[n] / "a.png")
    rows = result.predict(tmp_path / "in", out=tmp_path / "out")
    for n, row in enumerate(rows):
        folders = {"image": "in", "mask": "out"}
        assert row == {key: str(tmp_path / name / "xyz"[n] / "a.png") for key, name in folders.items()}
        with Image.open(row["mask"]) as image:
            assert image.mode == "P"
            found = np.asarray(image)
        truth = scene(1000 + n)[1]
        assert found.shape == truth.shape
        seen = (found != 255) & (truth != 255)
        assert 0.3 < seen.mean() < 1
        assert (found == truth)[seen].mean() > 0.75
    with pytest.raises(DataError, match="exists"):
        result.predict(tmp_path / "in", out=tmp_path / "out")
    with pytest.raises(DataError, match="Pass a folder"):
        result.predict(tmp_path / "in", out=tmp_path / "p.csv")
    (tmp_path / "in" / "bad.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"bad\.png"):
        result.predict(tmp_path / "in", out=tmp_path / "more")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("value", [3, 0])
def test_more_values_that_do_not_count(value: int, tmp_path: Path) -> None:
    """The same as masks in which they are 255; a class that the model has is not in the mean."""
    pairs = [scene(seed) for seed in range(20)]
    classes = 3 if value == 3 else 4
    names = ("ground", "red", "green", "void")
    for name, mark in (("marked", value), ("plain", 255)):
        shifted = [(image, np.where(mask == 255, mark, mask + (value == 0))) for image, mask in pairs]
        shifted = [(i, np.where(m == 256, 255, m).astype(np.uint8)) for i, m in shifted]
        convert(shifted, tmp_path / f"{name}.beton", classes=names, progress=False)
    results = []
    for name, task in (
        ("marked", Segmentation(classes, ignore_index=value)),
        ("plain", Segmentation(classes if value == 0 else 4, metrics=("pixel_accuracy", "miou"))),
    ):
        files = (str(tmp_path / f"{name}.beton"),) * 2
        pipeline = pipeline_of(files).replace(model_options={"num_classes": task.classes}).task(task)
        results.append(pipeline.replace(epochs=1).fit(epochs=1, progress=False))
    marked, plain = results
    errors: Any = marked.errors()
    assert errors.metrics == pytest.approx(marked.metrics, abs=1e-6)
    assert errors.classes == names[:classes]
    assert errors.confusion[value].sum() == 0 if value < classes else True
    counted = [score for at, score in enumerate(errors.scores()) if at != value]
    assert marked.metrics["miou"] == pytest.approx(np.nanmean(counted), abs=1e-5)
    if value == 0:  # the same model on the same pixels
        assert marked.metrics["val_loss"] == pytest.approx(plain.metrics["val_loss"], abs=1e-6)
        assert marked.metrics["pixel_accuracy"] == pytest.approx(plain.metrics["pixel_accuracy"], abs=1e-6)
    assert Pipeline.from_recipe(
        pipeline_of(files).task(Segmentation(4, ignore_index=[9, 7])).replace(epochs=1).to_recipe()
    ).goal == Segmentation(4, ignore_index=(7, 9))


@pytest.mark.parametrize(
    ("value", "message"), [(-1, "must be a value of the masks"), ([0, 1], "fewer than 2"), ("a", "must be")]
)
def test_values_that_cannot_be_ignored(value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Segmentation(3, ignore_index=value)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, partial(F.cross_entropy, ignore_index=11)])
def test_one_of_torchs_losses_ignores_what_does_not_count(loss: Any) -> None:
    """Whatever class index it ignores itself: -100, unless another is passed."""
    rng = torch.Generator().manual_seed(0)
    outputs = torch.randn(2, 11, 4, 4, generator=rng)
    masks = torch.randint(11, (2, 4, 4), generator=rng, dtype=torch.uint8)
    masks[0, 0], masks[1, 1] = 255, 11
    task = Segmentation(11, ignore_index=11, loss=loss)
    expected = F.cross_entropy(outputs, task.metric_targets(masks), ignore_index=255)
    torch.testing.assert_close(task.loss(outputs, masks), expected)
    assert task.mean(task.move(torch.device("cpu"))).denominator(masks) == 24
    assert Segmentation(11, ignore_index=11, loss=lambda outputs, _: outputs.mean()).ignored == (255, 11)


def test_classes_are_weighted_by_one_of_torchs_losses(files: Files) -> None:
    weight = torch.tensor([0.5, 1.0, 2.0])
    found = []
    for ignored in (-100, 255):  # torch's default, and that of masks
        task = Segmentation(3, loss=nn.CrossEntropyLoss(weight=weight, ignore_index=ignored))
        found.append(pipeline_of(files).task(task).fit(epochs=1, progress=False))
    assert_same_weights(*found)
