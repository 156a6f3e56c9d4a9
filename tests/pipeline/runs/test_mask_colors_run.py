"""Masks of data with a palette, in its colors: a shown batch, the errors, predictions, and after the run was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import segmentation_jobs as jobs
from drivetrain import DataError
from drivetrain.loaders import convert
from drivetrain.pipeline import load_run
from drivetrain.pipeline.runs.analysis.picture import overlaid
from PIL import Image

COLORS = [(10, 20, 30), (250, 0, 120), (0, 240, 250)]
HEX = ("#0a141e", "#fa0078", "#00f0fa")


def write(folder: Path, *, colored: bool) -> jobs.Files:
    files = str(folder / "train.beton"), str(folder / "val.beton")
    for path, seeds in zip(files, (range(32), range(1000, 1016)), strict=True):
        data: list[Any] = []
        for image, mask in map(jobs.scene, seeds):
            shown = Image.fromarray(mask)
            shown.putpalette([level for color in COLORS for level in color] + [0] * 3 * 253)
            data.append((image, shown if colored else mask))
        convert(data, path, classes=jobs.CLASSES, progress=False)
    return files


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("colors")
    pipeline = jobs.pipeline_of(write(folder, colored=True))
    pipeline.fit(epochs=1, out=folder / "run", progress=False)
    return pipeline, load_run(folder / "run"), folder


def test_a_batch_is_shown_in_them(run: Any) -> None:
    pipeline, _, _ = run
    batch = pipeline.show_batch(samples=16)
    legend = {name: color for name, color, counts in batch._legend() if counts}
    assert legend == dict(zip(jobs.CLASSES, HEX, strict=True))
    for (picture,), mask, ((drawn,), _) in zip(batch.pictures, batch.masks, batch._drawn(), strict=True):
        counts = mask != 255
        expected = (picture[counts].astype(float) + np.array(COLORS)[mask[counts]]) / 2
        assert np.abs(drawn[counts] - expected).max() <= 0.51


def test_errors_are_shown_in_them(run: Any) -> None:
    _, result, _ = run
    errors = result.errors()
    assert errors.colors == HEX
    pictures = errors.pictures[int(errors.samples[errors.worst(1)[0]])]
    drawn = overlaid(pictures, errors.colors)
    side = jobs.SIDE
    wrong = (pictures["truth"] != 255) & (pictures["truth"] != pictures["prediction"])
    assert wrong.any()
    assert (drawn[:, side:][wrong] == np.array(COLORS)[pictures["prediction"][wrong]]).all()


def test_predictions_are_written_in_them(run: Any) -> None:
    _, result, folder = run
    assert result.inputs.colors == HEX
    for number in range(2):
        Image.fromarray(jobs.scene(number)[0]).save(folder / f"{number}.png")
    photos = [folder / "0.png", folder / "1.png"]
    result.predict(photos, out=folder / "masks")
    for number, row in enumerate(result.predict(photos)):
        with Image.open(folder / f"masks/{number}.png") as file:
            assert file.mode == "P"
            classes, shown = np.asarray(file), np.asarray(file.convert("RGB"))
        counts = classes != 255
        assert (shown[counts] == np.array(COLORS)[classes[counts]]).all()
        assert {*np.unique(classes[counts]).tolist()} == {*np.unique(row["prediction"]).tolist()}
    page = result.predict(photos)._repr_html_()
    assert page.count("<img") == 2


def test_two_masks_of_one_name_are_refused_before_anything_is_predicted(run: Any, tmp_path: Path) -> None:
    _, result, _ = run
    for name in ("a.jpg", "a.png"):
        Image.fromarray(jobs.scene(0)[0]).save(tmp_path / name)
    (tmp_path / "0.jpg").write_bytes(b"damaged: predicting would raise this first")
    with pytest.raises(DataError, match=r"a\.png: another image has the same mask, a\.png"):
        result.predict(tmp_path, out=tmp_path / "masks")
    assert not (tmp_path / "masks").exists()


def test_a_folder_that_cannot_be_replaced_is_refused_before_anything_is_predicted(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, result, _ = run
    (tmp_path / "0.jpg").write_bytes(b"damaged: predicting would raise this first")
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    for out, remedy in ((".", "masks"), (tmp_path / "link", f"{tmp_path}/link/masks")):
        with pytest.raises(DataError, match=rf"is a link, a mount or .* Pass a new folder in it: {remedy}\.$"):
            result.predict(tmp_path / "0.jpg", out=out)


def test_without_a_palette_nothing_is_added(tmp_path: Path) -> None:
    result = jobs.pipeline_of(write(tmp_path, colored=False)).fit(epochs=1, progress=False)
    assert result.inputs.colors == ()
    assert "colors" not in result.history.facts["inputs"]
