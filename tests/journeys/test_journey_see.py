"""Job 9: see the data as the model does, see what it gets wrong, and pass the run on as one file."""

import json
import re
from pathlib import Path

import pytest
from command_line import call
from drivetrain.transforms import CutMix, MixUp
from journey_models import photos
from PIL import Image


def side(path: str) -> int:
    with Image.open(path) as image:
        return min(image.size)


@pytest.mark.long
def test_a_batch_as_the_model_sees_it() -> None:
    names = sorted(path.name for path in Path("photos/train").iterdir())
    pipeline = photos(image_size=48)
    batch = pipeline.show_batch(samples=6)
    assert {image.shape for views in batch.pictures for image in views} == {(48, 48, 3)}
    assert set(batch.texts) <= set(names)
    mixed = pipeline.transform(MixUp(0.5), CutMix(1.0)).show_batch(samples=6, epoch=1, epochs=3)
    assert any("%" in text for text in mixed.texts)
    mixed.save("batch.png")
    assert side("batch.png") > 96
    assert call("show", "mine.yaml", "--out", "recipe.png").code == 0
    assert side("recipe.png") > 64


@pytest.mark.long
def test_errors_and_the_report() -> None:
    result = photos().fit(epochs=2, out="runs/see", progress=False)
    errors = result.errors()
    assert errors.confusion.sum() == 12
    assert errors.confusion.diagonal().sum() / 12 == pytest.approx(result.accuracy)
    worst = errors.worst(3)
    assert errors.losses[worst[0]] == errors.losses.max()
    end = call("errors", "runs/see", "--json")
    assert end.code == 0, end
    assert json.loads(end.out)["metrics"]["top1"] == pytest.approx(result.accuracy)
    assert all(name in call("errors", "runs/see", "--out", "errors.png").out for name in errors.classes)
    assert side("errors.png") > 100
    assert call("report", "runs/see", "--out", "report.html").code == 0
    page = Path("report.html").read_text()
    assert not re.search(r"<script|(src|href)=.?https?:", page)
    assert all(name in page for name in errors.classes)
    assert page.count("<svg") + page.count("data:image/") >= 3
