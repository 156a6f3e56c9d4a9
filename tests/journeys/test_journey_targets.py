"""Job 4: masks of which a class is void, several labels, numbers far from 0, and images of 16 bits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import done
from drivetrain import Pipeline, Regression, Segmentation
from drivetrain.loaders import convert
from drivetrain.pipeline import load_run
from PIL import Image
from torch import nn
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

pytestmark = pytest.mark.long

NAMES = ["Sky", "Building", "Pole", "Road", "Sidewalk", "Tree", "Sign", "Fence", "Car", "Person", "Cyclist"]


def test_masks_of_street_scenes() -> None:
    Path("names.txt").write_text("\n".join(NAMES))
    for part in ("train", "val"):
        masks = ["--labels", f"camvid/{part}/masks", "--classes", "names.txt", "--ignore", "11"]
        done("convert", f"camvid/{part}/images", f"{part}-masks.beton", *masks, "--max-resolution", "160")
    assert "Building" in done("inspect", "train-masks.beton", "--sheet", "sheet.png")
    with Image.open("sheet.png") as sheet:
        assert sheet.width > 160
    pipeline = Pipeline(lraspp_mobilenet_v3_large, num_classes=11, weights_backbone=None)
    pipeline = pipeline.load("train-masks.beton", "val-masks.beton", batch_size=8, image_size=(72, 96))
    result = pipeline.task(Segmentation(11)).fit(epochs=1, out="runs/masks", progress=False)
    confusion = result.errors().confusion
    union = confusion.sum(0) + confusion.sum(1) - confusion.diagonal()
    there = union > 0
    miou = (confusion.diagonal()[there] / union[there]).mean()
    assert result.metrics["miou"] == pytest.approx(miou, abs=1e-4)
    done("predict", "runs/masks", "camvid/val/images", "--out", "masks")
    files = sorted(Path("camvid/val/images").iterdir())
    assert len(list(Path("masks").rglob("*.png"))) == len(files) == 12
    with Image.open(files[0]) as image, Image.open(f"masks/{files[0].stem}.png") as mask:
        assert (mask.size, mask.mode) == (image.size, "P")
        assert set(np.unique(mask)) <= {*range(11), 255}
        assert len({tuple(mask.getpalette()[3 * n : 3 * n + 3]) for n in range(11)}) == 11


def test_several_labels_from_a_table() -> None:
    for part in ("train", "val"):
        names = [path.relative_to(f"photos/{part}") for path in sorted(Path(f"photos/{part}").rglob("*.jpg"))]
        rows = [f"{name},{number % 2},{number % 3 // 2}" for number, name in enumerate(names)]
        Path(f"{part}.csv").write_text("\n".join(["file,sun,sea", *rows]))
        done("convert", f"photos/{part}", f"{part}-labels.beton", "--labels", f"{part}.csv")
    data = ["--train", "train-labels.beton", "--val", "val-labels.beton"]
    done("train", "mine.yaml", *data, "--out", "runs/labels", "task=MultiLabel", "model_options.num_classes=2")
    result = load_run("runs/labels")
    assert sorted(result.metrics) == ["f1", "map", "val_loss"]
    assert result.errors().classes == ("sun", "sea")
    printed = done("predict", "runs/labels", f"photos/val/{names[0]}", "--json")
    assert sorted(json.loads(printed)["probabilities"]) == ["sea", "sun"]


def test_numbers_far_from_0() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (48, 1, 1, 3), dtype=np.uint8).repeat(24, 1).repeat(24, 2)
    prices = 180_000 + 500 * images.mean((1, 2, 3))
    convert((images, prices), "prices.beton", progress=False)
    start = Pipeline(nn.Sequential(nn.AvgPool2d(24), nn.Flatten(), nn.Linear(3, 1)))
    start = start.load("prices.beton", val_split=0.25, batch_size=6, image_size=24).optimize("adamw", lr=0.1)
    unscaled = start.task(Regression())
    assert "scale_targets=True" in str(unscaled.plan())
    result = start.task(Regression(scale_targets=True)).fit(epochs=5, progress=False)
    assert result.metrics["r2"] > 0.9 > 0 > unscaled.fit(epochs=5, progress=False).metrics["r2"]
    assert result.predict(images[0])[0]["value"] == pytest.approx(prices[0], abs=20_000)
    assert float(result.model.target_mean) == pytest.approx(prices.mean(), rel=0.02)


def test_images_of_16_bits() -> None:
    """The classes differ by less than a level of 8 bits."""
    labels = np.arange(32) % 2
    scans = np.random.default_rng(0).integers(20_000, 20_020, (32, 40, 40)).astype(np.uint16)
    scans += 100 * labels[:, None, None].astype(np.uint16)
    convert((scans, labels), "scans.beton", image_mode="I;16", classes=["well", "ill"], progress=False)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Flatten(), nn.Linear(900, 2))
    pipeline = Pipeline(model).load("scans.beton", batch_size=8, image_size=32, mean=(0.306,), std=(0.001,))
    result = pipeline.optimize("adamw", lr=0.01).fit(epochs=4, progress=False)
    assert result.evaluate("scans.beton")["top1"] == 1
    rows = result.predict([torch.from_numpy(scans[1]), scans[2]])
    assert [row["class"] for row in rows] == ["ill", "well"]
