"""Job 4: masks of which a class is void, several labels, numbers far from 0, and images of 16 bits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import call
from drivetrain import Pipeline, Regression, Segmentation
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.pipeline import load_run
from PIL import Image
from torch import nn
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

NAMES = "Sky Building Pole Road Sidewalk Tree Sign Fence Car Pedestrian Bicyclist".split()


@pytest.mark.long
def test_masks_of_street_scenes() -> None:
    Path("names.txt").write_text("\n".join(NAMES))
    for part in ("train", "val"):
        masks = ["--labels", f"camvid/{part}/masks", "--classes", "names.txt", "--ignore", "11"]
        end = call(
            "convert", f"camvid/{part}/images", f"{part}-masks.beton", *masks, "--max-resolution", "160"
        )
        assert end.code == 0, end
    end = call("inspect", "train-masks.beton", "--sheet", "sheet.png")
    assert "Building" in end.out
    assert "void" not in end.out
    with Image.open("sheet.png") as sheet:
        assert sheet.width > 160
    pipeline = Pipeline(lraspp_mobilenet_v3_large, num_classes=11, weights_backbone=None)
    pipeline = pipeline.load("train-masks.beton", "val-masks.beton", batch_size=8, image_size=(72, 96))
    pipeline = pipeline.task(Segmentation(11)).optimize("adamw", lr=1e-3)
    result = pipeline.fit(epochs=1, out="runs/masks", progress=False)
    errors = result.errors()
    assert errors.confusion.shape == (11, 11)
    shares = errors.confusion.diagonal() / np.maximum(
        errors.confusion.sum(0) + errors.confusion.sum(1) - errors.confusion.diagonal(), 1
    )
    there = errors.confusion.sum(0) + errors.confusion.sum(1) > 0
    assert result.metrics["miou"] == pytest.approx(shares[there].mean(), abs=1e-4)
    assert call("predict", "runs/masks", "camvid/val/images", "--out", "masks").code == 0
    files = sorted(Path("camvid/val/images").iterdir())
    assert len(list(Path("masks").rglob("*.png"))) == len(files) == 12
    with Image.open(files[0]) as image, Image.open(f"masks/{files[0].stem}.png") as mask:
        assert mask.size == image.size
        assert mask.mode == "P"
        assert set(mask.get_flattened_data()) <= {*range(11), 255}
        assert len({mask.getpalette()[3 * index : 3 * index + 3].__str__() for index in range(11)}) == 11


@pytest.mark.long
def test_void_is_ignored_in_training_too() -> None:
    """Files that keep the void class: `Segmentation(11, ignore_index=11)` gives the numbers of files without it."""
    options = {"max_resolution": 96, "progress": False}
    masks = {"labels": "camvid/train/masks", **options}
    convert("camvid/train/images", "all.beton", classes=[*NAMES, "void"], **masks)
    convert("camvid/train/images", "without.beton", classes=NAMES, mask_map={11: 255}, **masks)
    losses, model = [], nn.Conv2d(3, 11, 5, padding=2)
    for file, task in (("all.beton", Segmentation(11, ignore_index=11)), ("without.beton", Segmentation(11))):
        pipeline = Pipeline(model).load(file, file, batch_size=8, image_size=48)
        losses.append(pipeline.task(task).fit(epochs=1, progress=False).history.epochs[0])
    first, second = losses
    assert (first.loss, first.val_loss, first.metrics) == (second.loss, second.val_loss, second.metrics)


@pytest.mark.long
def test_several_labels_from_a_table() -> None:
    """As tasks.md has it, from the command line to a prediction."""
    for part in ("train", "val"):
        rows = [
            f"{path.relative_to(f'photos/{part}')},{number % 2},{number % 3 // 2}"
            for number, path in enumerate(sorted(Path(f"photos/{part}").rglob("*.jpg")))
        ]
        Path(f"{part}.csv").write_text("\n".join(["file,sun,sea", *rows]))
        end = call("convert", f"photos/{part}", f"{part}-labels.beton", "--labels", f"{part}.csv")
        assert end.code == 0, end
    values = [
        "model_options.num_classes=2",
        "task=MultiLabel",
        "train=train-labels.beton",
        "val=val-labels.beton",
    ]
    end = call("train", "mine.yaml", "--out", "runs/labels", *values)
    assert end.code == 0, end
    assert "map" in load_run("runs/labels").metrics
    end = call("predict", "runs/labels", str(next(Path("photos/val").rglob("*.jpg"))), "--json")
    assert sorted(json.loads(end.out)["probabilities"]) == ["sea", "sun"]
    assert load_run("runs/labels").errors().classes == ("sun", "sea")


@pytest.mark.long
def test_numbers_far_from_0() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (48, 1, 1, 3), dtype=np.uint8).repeat(24, 1).repeat(24, 2)
    prices = 180_000 + 500 * images.mean((1, 2, 3))
    convert((images, prices), "prices.beton", progress=False)
    start = Pipeline(lambda: nn.Sequential(nn.AvgPool2d(24), nn.Flatten(), nn.Linear(3, 1)))
    start = start.load("prices.beton", val_split=0.25, batch_size=6, image_size=24)
    unscaled = start.task(Regression())
    assert "scale_targets=True" in str(unscaled.plan())
    scaled = start.task(Regression(scale_targets=True)).optimize("adamw", lr=0.1)
    result = scaled.fit(epochs=5, progress=False)
    assert result.metrics["r2"] > 0.9
    (row,) = result.predict(images[0])
    assert row["value"] == pytest.approx(prices[0], abs=20_000)
    assert float(result.model.target_mean) == pytest.approx(prices.mean(), rel=0.02)
    assert unscaled.optimize("adamw", lr=0.1).fit(epochs=5, progress=False).metrics["r2"] < 0


@pytest.mark.long
def test_images_of_16_bits() -> None:
    """The classes differ by less than a level of 8 bits."""
    labels = np.arange(32) % 2
    scans = np.random.default_rng(0).integers(20_000, 20_020, (32, 40, 40)).astype(np.uint16)
    scans += 100 * labels[:, None, None].astype(np.uint16)
    convert((scans, labels), "scans.beton", image_mode="I;16", classes=["well", "ill"], progress=False)
    options = {"mean": (0.306,), "std": (0.001,), "batch_size": 8, "image_size": 32}
    with FFCVLoader("scans.beton", **options) as loader:
        images, _ = next(iter(loader))
    assert images.shape == (8, 1, 32, 32)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Flatten(), nn.Linear(900, 2))
    pipeline = Pipeline(model).load("scans.beton", "scans.beton", **options).optimize("adamw", lr=0.01)
    result = pipeline.fit(epochs=4, progress=False)
    assert result.accuracy == 1
    rows = result.predict([torch.from_numpy(scans[1]), scans[2]])
    assert [row["class"] for row in rows] == ["ill", "well"]
