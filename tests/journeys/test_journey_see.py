"""Job 9: see the data as the model does, see what it gets wrong, and pass the run on as one file."""

import json
import re
from pathlib import Path

import pytest
from command_line import done
from drivetrain.transforms import CutMix, MixUp
from journey_models import photos
from PIL import Image

pytestmark = pytest.mark.long


def side(path: str) -> int:
    with Image.open(path) as image:
        return min(image.size)


def test_a_batch_as_the_model_sees_it() -> None:
    names = {path.name for path in Path("photos/train").iterdir()}
    pipeline = photos(image_size=48)
    batch = pipeline.show_batch(samples=6)
    assert {image.shape for views in batch.pictures for image in views} == {(48, 48, 3)}
    assert set(batch.texts) <= names
    mixed = pipeline.transform(MixUp(0.5), CutMix(1.0)).show_batch(samples=6, epoch=1, epochs=3)
    assert any("%" in text for text in mixed.texts)
    assert side(str(mixed.save("batch.png"))) > 96
    done("show", "mine.yaml", "--out", "recipe.png")
    assert side("recipe.png") > 64


def test_errors_and_the_report() -> None:
    result = photos().fit(epochs=2, out="runs/see", progress=False)
    errors = result.errors()
    assert errors.confusion.sum() == 12
    assert errors.confusion.diagonal().sum() / 12 == pytest.approx(result.accuracy)
    assert errors.losses[errors.worst(3)[0]] == errors.losses.max()
    found = json.loads(done("errors", "runs/see", "--json"))
    assert found["metrics"]["top1"] == pytest.approx(result.accuracy)
    printed = done("errors", "runs/see", "--out", "errors.png")
    done("report", "runs/see", "--out", "report.html")
    page = Path("report.html").read_text()
    assert all(name in printed and name in page for name in errors.classes)
    assert side("errors.png") > 100
    assert not re.search(r"<script|(src|href)=.?https?:", page)
    assert page.count("<svg") + page.count("data:image/") >= 3
