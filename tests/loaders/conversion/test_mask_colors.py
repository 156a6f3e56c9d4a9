"""Colors of masks with a palette: kept in the manifest, of the classes that are there, after `mask_map`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import call
from drivetrain.common.errors import BetonError
from drivetrain.loaders import FFCVLoader, contact_sheet, convert, open_beton
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.beton.targets import palette
from loader_pictures import file_bytes, picture
from numpy.typing import NDArray
from PIL import Image

SKY, ROAD, TREE, VOID = (128, 128, 128), (128, 64, 128), (128, 128, 0), (1, 2, 3)
COLORS = {0: SKY, 1: ROAD, 2: TREE, 11: VOID}
HEX = ["#808080", "#804080", "#808000"]


def mask(values: Any, colors: Any = None) -> Image.Image:
    """20 × 30 pixels in stripes of these values, with a palette that ends after the last color."""
    shown = Image.fromarray(np.repeat(np.resize(np.array(values, np.uint8), 20)[:, None], 30, 1))
    colors = COLORS if colors is None else colors
    flat = [level for index in range(max(colors) + 1) for level in colors.get(index, (9, 9, 9))]
    shown.putpalette(flat)
    return shown


def manifest(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(Path(f"{path}.json").read_bytes())
    return made


def write(path: Path, *masks: Any, **options: Any) -> list[str] | None:
    """The colors that are kept of the labels."""
    data = [(picture(number, 20, 30), each) for number, each in enumerate(masks)]
    convert(data, path, progress=False, **options)
    own = open_beton(path).colors
    assert own == manifest(path).get("colors", {})
    return own.get("label")


@pytest.mark.parametrize("form", [lambda image: image, partial(file_bytes, form="PNG")], ids=["Pillow", "PNG"])
def test_the_colors_of_the_classes_that_are_there(form: Any, tmp_path: Path) -> None:
    """Of all masks, also if the first has fewer colors; of class 11, which is not there, none."""
    few = form(mask([0, 1], {0: SKY, 1: ROAD}))
    assert write(tmp_path / "a.beton", few, form(mask([1, 2])), workers=2) == HEX
    assert write(tmp_path / "b.beton", form(mask([0, 2]))) == [HEX[0], "", HEX[2]]
    assert write(tmp_path / "c.beton", form(mask([0])), form(mask([0, 1], {0: TREE, 1: ROAD}))) == HEX[:2]


def test_masks_without_colors_keep_none(tmp_path: Path) -> None:
    plain = np.asarray(mask([0, 1]))
    assert write(tmp_path / "a.beton", plain) is None
    assert write(tmp_path / "b.beton", file_bytes(plain, "PNG")) is None
    assert "colors" not in manifest(tmp_path / "b.beton")
    assert write(tmp_path / "c.beton", plain, mask([1])) == ["", HEX[1]]


@pytest.mark.parametrize(
    ("values", "changes", "expected"),
    [
        ([0, 1, 2, 11], {11: 255}, HEX),  # what does not count needs no color
        ([0, 1, 11], {11: 2}, [*HEX[:2], "#010203"]),
        ([0, 1, 11], {np.uint8(11): np.int64(2)}, [*HEX[:2], "#010203"]),
        ([0, 1, 2], {1: 2, 2: 1}, [HEX[0], HEX[2], HEX[1]]),
        ([0, 1, 2], {2: 1}, HEX[:2]),  # its own color, not that of the class that joined it
        ([0, 2], {2: 1}, [HEX[0], HEX[2]]),
        ([0, 11], {11: 300}, HEX[:1]),
    ],
)
def test_they_follow_the_values(values: list[int], changes: dict[int, int], expected: Any, tmp_path: Path) -> None:
    assert write(tmp_path / "a.beton", mask(values), mask_map=changes) == expected


def test_of_a_folder_by_the_command(tmp_path: Path) -> None:
    for name in ("photos", "masks"):
        (tmp_path / name).mkdir()
    for number in range(3):
        Image.fromarray(picture(number, 20, 30)).save(tmp_path / f"photos/{number}.jpg")
        mask([0, 1, 2, 11]).save(tmp_path / f"masks/{number}.png")
    out = tmp_path / "a.beton"
    flags = ["--labels", str(tmp_path / "masks"), "--classes", "sky,road,tree", "--ignore", "11", "--quiet"]
    end = call("convert", str(tmp_path / "photos"), str(out), *flags)
    assert end.code == 0, end.err
    assert open_beton(out).colors == {"label": HEX}
    with FFCVLoader(out, batch_size=2, image_size=16, workers=1) as loader:
        assert loader.colors == tuple(HEX)
    contact_sheet(out, tmp_path / "sheet.png", columns=1, rows=1, side=34)
    drawn = np.asarray(Image.open(tmp_path / "sheet.png"))[7, 17].astype(int)
    own: NDArray[Any] = open_beton(out).pixels(0).astype(int)[0, 15]  # the first stripe is sky, half transparent
    assert np.abs((own + SKY) / 2 - drawn).max() < 60


def test_several_files_have_the_colors_of_all(tmp_path: Path) -> None:
    """Each manifest has those of its own samples."""
    data = [(picture(n, 20, 30), mask([n % 2])) for n in (0, 0, 1, 1)]
    convert(data, tmp_path / "a-{0,1}.beton", progress=False)
    assert open_beton(tmp_path / "a-0.beton").colors == {"label": [HEX[0]]}
    assert open_beton(tmp_path / "a-1.beton").colors == {"label": ["", HEX[1]]}
    files = open_files(str(tmp_path / "a-{0,1}.beton"))
    assert files.colors("label") == tuple(HEX[:2])
    assert files.colors("none") == ()


def test_a_field_has_its_own(tmp_path: Path) -> None:
    data = [(picture(0, 20, 30), 1, mask([0, 1])), (picture(1, 20, 30), 0, mask([1]))]
    convert(data, tmp_path / "a.beton", fields={"area": "mask"}, progress=False)
    assert open_beton(tmp_path / "a.beton").colors == {"area": HEX[:2]}
    with FFCVLoader(tmp_path / "a.beton", batch_size=2, image_size=16, workers=1) as loader:
        assert loader.colors == ()


@pytest.mark.parametrize(
    "wrong",
    [{"label": ["red"]}, {"image": [HEX[0]]}, {"label": [1]}, {"label": 3}, [1], {"label": ["#80808g"]}],
)
def test_a_manifest_with_other_colors_is_none(wrong: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.beton"
    write(path, mask([0, 1]))
    Path(f"{path}.json").write_text(json.dumps({**manifest(path), "colors": wrong}))
    with pytest.raises(BetonError, match="is not a manifest"):
        open_beton(path)


def test_colors_that_are_not_known_are_the_usual_ones() -> None:
    usual = palette()
    own = palette(["#010203", "", "#ff00ff"])
    assert own[:3].tolist() == [[1, 2, 3], usual[1].tolist(), [255, 0, 255]]
    assert (own[3:] == usual[3:]).all()
    assert len(palette(["#010203"] * 300)) == 256
