"""Boxes and keypoints in a shown batch, at the pixels where crop, flip and resize have put them.

The pictures tell themselves what was done to them: red is the column and green the row that a pixel was.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import field_jobs as jobs
import numpy as np
import pytest
import torch
from command_line import call
from drivetrain import Task
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.pipeline.runs.analysis.marks import Mark, color_of, marked
from drivetrain.transforms import ProgressiveResizing
from numpy.typing import NDArray
from PIL import Image


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return jobs.write(tmp_path_factory.mktemp("marks"))


def rgb(number: int) -> list[int]:
    return [*bytes.fromhex(color_of(number)[1:])]


def seen(picture: NDArray[np.uint8], number: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows and columns of the pixels in that color."""
    return np.nonzero((picture == rgb(number)).all(2))


def origin(picture: NDArray[np.uint8], channel: int) -> tuple[float, float]:
    """Slope and start of what was at an edge between pixels, by its place now: a line through the middle values."""
    line = picture[len(picture) // 2, :, 0] if channel == 0 else picture[:, picture.shape[1] // 2, 1]
    at = np.arange(len(line) // 8, len(line) - len(line) // 8)
    slope, start = np.polyfit(at + 0.5, line[at] + 0.5, 1)
    return float(slope), float(start)


def moved(picture: NDArray[np.uint8], places: NDArray[Any]) -> NDArray[np.float64]:
    """Where edges `(n, 2)`, columns and rows of the stored picture, are in this one."""
    lines = [origin(picture, channel) for channel in range(2)]
    return np.stack([(places[:, channel] - start) / slope for channel, (slope, start) in enumerate(lines)], 1)


LOADS: list[dict[str, Any]] = [
    {"crop": "resized", "scale": (0.3, 0.7)},
    {"crop": "whole"},
    {"crop": "resized", "image_size": (240, 208)},
    {"crop": "random", "flip": False},
]


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_they_are_drawn_where_they_are(files: tuple[str, str], load: dict[str, Any]) -> None:
    pipeline = jobs.pipeline_of(files, {"fields": ("boxes", "classes", "weight"), **load}).task(Idle())
    batch = pipeline.show_batch(samples=16)
    height, width = batch.pictures[0][0].shape[:2]
    times = 1 if min(height, width) >= 192 else -(-192 // min(height, width))
    flipped = boxes = outside = 0
    for number, (picture,), ((drawn,), _) in zip(numbers(files, load), batch.pictures, batch._drawn(), strict=True):
        assert drawn.shape == (height * times, width * times, 3)
        flipped += origin(picture, 0)[0] < 0
        stored, _, classes = jobs.places(number)
        for own, kind in zip(stored, classes, strict=True):
            corners = moved(picture, own.reshape(2, 2)) * times
            corners = np.sort(corners, 0).clip(0, [width * times, height * times])
            rows, columns = seen(drawn, kind)
            if (corners[1] - corners[0] < 0.5).any():
                assert len(rows) == 0
                outside += 1
                continue
            if (corners[1] - corners[0] < 8).any():
                continue  # a sliver at the edge: its lines cover each other
            edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            np.testing.assert_allclose(edges, corners.ravel(), atol=1.5 * times)
            boxes += 1
    assert boxes > 12
    assert (flipped > 3) == (load.get("flip", True))
    assert outside > 0 or load["crop"] == "whole"
    assert [(name, color) for name, color, _ in batch._legend()] == [
        (name, color_of(kind)) for kind, name in enumerate(jobs.NAMES)
    ]


class Idle(Task):
    """Trains on nothing; its targets are looked at."""

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:  # noqa: ARG002
        return outputs.square().mean()


def numbers(files: tuple[str, str], load: dict[str, Any]) -> list[int]:
    """The samples of the first batch."""
    options = {"batch_size": 16, "image_size": jobs.SIDE, "workers": 1, **load}
    with FFCVLoader(files[0], **options) as loader:
        return [int(index) for index in loader.shares(0)[0]]


def test_keypoints_are_where_they_are_and_those_outside_are_not_shown(files: tuple[str, str]) -> None:
    load: dict[str, Any] = {"fields": ("points",), "scale": (0.2, 0.5)}
    batch = jobs.pipeline_of(files, load).task(Idle()).show_batch(samples=16)
    shown = hidden = 0
    for number, (picture,), own, ((drawn,), _) in zip(
        numbers(files, {"scale": (0.2, 0.5)}), batch.pictures, batch.marks, batch._drawn(), strict=True
    ):
        _, points, _ = jobs.places(number)
        expected = moved(picture, points + 0.5)
        inside = ((expected > 0.3) & (expected < jobs.SIDE - 0.3)).all(1)
        near = ((expected > -0.3) & (expected < jobs.SIDE + 0.3)).all(1) & ~inside
        if near.any():
            continue
        assert len(own) == inside.sum()
        assert {mark.name for mark in own} <= {"points"}
        rows, columns = seen(drawn, 0)
        for x, y in 3 * expected[inside]:
            distance = np.hypot(columns + 0.5 - x, rows + 0.5 - y)
            assert distance.min() < 2
            assert (distance < 5).sum() > 25  # a dot, and not only its edge
        shown, hidden = shown + inside.sum(), hidden + (~inside).sum()
    assert shown > 5
    assert hidden > 5


def test_they_are_those_of_the_step(files: tuple[str, str]) -> None:
    """At the size of the epoch, in the split of ranks."""
    pipeline = jobs.pipeline_of(files).transform(ProgressiveResizing(0.5, delay=0.3, finetune=0.3))
    pipeline = pipeline.distribute("ddp", devices=2, device="cpu")
    batch = pipeline.show_batch(samples=16, epochs=3)
    options: Any = {"batch_size": 16, "image_size": jobs.SIDE // 2, "workers": 1, "fields": jobs.FIELDS}
    with FFCVLoader(files[0], **options) as loader:
        _, _, boxes, points, classes, _ = next(iter(loader))
    assert batch.pictures[0][0].shape[0] == jobs.SIDE // 2
    for own, frames, at, kinds in zip(batch.marks, boxes, points, classes, strict=True):
        frames_shown = [
            (jobs.NAMES[kind], kind, tuple(place))
            for kind, place in zip(kinds, frames.tolist(), strict=True)
            if place[2] > place[0] and place[3] > place[1]
        ]
        assert [(mark.name, mark.number, mark.place) for mark in own if len(mark.place) == 4] == frames_shown
        inside = [tuple(place) for place in at.tolist() if all(-0.5 <= each < 31.5 for each in place)]
        assert [mark.place for mark in own if len(mark.place) == 2] == inside


def test_a_file_and_a_notebook_show_them(files: tuple[str, str], tmp_path: Path) -> None:
    batch = jobs.pipeline_of(files, {"crop": "whole", "flip": False}).show_batch(samples=4)
    with Image.open(batch.save(tmp_path / "batch.png")) as image:
        picture = np.asarray(image.convert("RGB")).astype(int)
    for number in range(3):  # frames and patches of the legend, blurred a little
        near = (np.abs(picture - rgb(number)).max(2) < 60).sum()
        assert near > 200, number
    page = batch._repr_html_()
    assert page.count("<img") == 4
    for name, number in zip(jobs.NAMES, range(3), strict=True):
        assert f"background:{color_of(number)}" in page
        assert name in page


def test_the_command_draws_them(files: tuple[str, str], tmp_path: Path) -> None:
    recipe = jobs.pipeline_of(files).replace(epochs=2).to_recipe()
    (tmp_path / "recipe.json").write_text(json.dumps({**recipe, "loading": {}}))
    out = tmp_path / "batch.png"
    fields = 'loading.fields=["boxes","points","classes","weight"]'
    end = call("show", str(tmp_path / "recipe.json"), fields, "--out", str(out))
    assert (end.code, end.err) == (0, "")
    picture = np.asarray(Image.open(io.BytesIO(out.read_bytes())).convert("RGB")).astype(int)
    assert (np.abs(picture - rgb(0)).max(2) < 60).sum() > 200


def test_fields_without_classes_have_a_color_each(tmp_path: Path) -> None:
    data = [(jobs.plane(), 0, [[20, 10, 60, 50]], [[100, 20, 140, 100]], [[50, 70]]) for _ in range(8)]
    kinds = {"cars": "boxes", "cats": "boxes", "eyes": "keypoints"}
    convert(data, tmp_path / "a.beton", fields=kinds, write_mode="raw", progress=False)
    load: dict[str, Any] = {"batch_size": 8, "fields": tuple(kinds), "crop": "whole", "flip": False}
    files = str(tmp_path / "a.beton"), str(tmp_path / "a.beton")
    batch = jobs.pipeline_of(files, load).task(Idle()).show_batch(samples=1)
    assert [name for name, _, _ in batch._legend()] == ["cars", "cats", "eyes"]
    assert [mark.number for mark in batch.marks[0]] == [0, 1, 2]


def test_a_field_of_masks_is_shown(tmp_path: Path) -> None:
    mask = np.zeros((jobs.HEIGHT, jobs.WIDTH), np.uint8)
    mask[20:60, 50:100] = 1
    shown = Image.fromarray(mask)
    shown.putpalette([0, 0, 0, 250, 120, 0])
    data = [(jobs.plane(), 2, shown, [[50, 20, 100, 60]]) for _ in range(8)]
    kinds = {"area": "mask", "boxes": "boxes"}
    convert(data, tmp_path / "a.beton", fields=kinds, classes=list("abc"), write_mode="raw", progress=False)
    load: dict[str, Any] = {"batch_size": 8, "fields": tuple(kinds), "crop": "whole", "flip": False}
    files = str(tmp_path / "a.beton"), str(tmp_path / "a.beton")
    batch = jobs.pipeline_of(files, load).task(Idle()).show_batch(samples=2)
    assert batch.texts == ("c", "c")
    assert batch.masks[0].shape == (jobs.SIDE, jobs.SIDE)
    assert [(name, color) for name, color, _ in batch._legend()] == [
        ("0", "#000000"), ("1", "#fa7800"), ("boxes", color_of(0)),
    ]  # fmt: skip
    (drawn,), _ = batch._drawn()[0]
    (picture,) = batch.pictures[0]
    expected = (picture[20, 24].astype(float) + np.array([250, 120, 0])) / 2  # in the middle of the area
    np.testing.assert_allclose(drawn[20 * 3 + 1, 24 * 3 + 1], expected, atol=1)


def test_edges_of_the_drawing() -> None:
    """A frame lies inside of its box, and a point at a whole number in the middle of a pixel."""
    blank = np.full((192, 200, 3), 7, np.uint8)
    drawn = marked(blank, [Mark("box", 0, (10.0, 20.0, 50.0, 90.0))])
    rows, columns = seen(drawn, 0)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (20, 89, 10, 49)
    assert (drawn[25, 10] == rgb(0)).all()
    assert (drawn[25, 9] == 7).all()
    assert (drawn[55, 30] == 7).all()  # inside
    assert (blank == 7).all()
    small = marked(blank[:24, :32], [Mark("point", 1, (5.0, 3.0))])
    assert small.shape == (192, 256, 3)
    rows, columns = seen(small, 1)
    assert rows.mean() == pytest.approx(3.5 * 8 - 0.5, abs=0.5)
    assert columns.mean() == pytest.approx(5.5 * 8 - 0.5, abs=0.5)


def test_a_large_picture_keeps_its_size_and_has_thicker_lines() -> None:
    drawn = marked(np.zeros((960, 1200, 3), np.uint8), [Mark("box", 0, (100.0, 200.0, 700.0, 800.0))])
    assert drawn.shape == (960, 1200, 3)
    assert (drawn[500, 100:110] == rgb(0)).all()
    assert (drawn[500, 110] == 0).all()
