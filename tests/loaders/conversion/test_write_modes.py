"""`write_mode`, `max_resolution` and `min_resolution`, compared with FFCV's RGBImageField."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drivetrain.common.errors import DataError
from drivetrain.loaders import Beton, convert, open_beton
from drivetrain.loaders.conversion.encode import Encoding
from loader_pictures import image_folder, jpeg_bytes, picture
from PIL import Image

SMALL, LARGE = picture(1, 20, 24), picture(2, 90, 120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small and a large picture, each as JPEG and as PNG: `1-small.jpg`, `2-small.png`, `3-…`, `4-large.png`."""
    root = tmp_path_factory.mktemp("modes") / "images"
    (root / "a").mkdir(parents=True)
    for number, pixels in ((1, SMALL), (3, LARGE)):
        (root / "a" / f"{number}.jpg").write_bytes(jpeg_bytes(pixels))
        Image.fromarray(pixels).save(root / "a" / f"{number + 1}.png")
    return root


def modes(source: Any, tmp_path: Path, **options: Any) -> tuple[Beton, list[int], dict[str, int]]:
    report = convert(source, tmp_path / "a.beton", **options)
    beton = open_beton(tmp_path / "a.beton")
    assert report.modes == {
        name: count
        for name, count in (("jpg", (beton.modes == 0).sum()), ("raw", beton.modes.sum()))
        if count
    }
    return beton, beton.modes.tolist(), report.treatments


def test_auto_keeps_jpegs_and_small_pixels(folder: Path, tmp_path: Path) -> None:
    _, found, how = modes(folder, tmp_path)
    assert found == [0, 1, 0, 0]
    assert how == {"copied unchanged": 2, "stored": 2}


def test_jpg_makes_all_jpegs_and_passes_files_through(folder: Path, tmp_path: Path) -> None:
    beton, found, how = modes(folder, tmp_path, write_mode="jpg")
    assert found == [0, 0, 0, 0]
    assert how == {"copied unchanged": 2, "stored": 2}
    assert beton.stored(0) == jpeg_bytes(SMALL)


def test_raw_stores_the_pixels_that_the_file_decodes_to(folder: Path, tmp_path: Path) -> None:
    beton, found, how = modes(folder, tmp_path, write_mode="raw")
    assert found == [1, 1, 1, 1]
    assert how == {"decoded to raw pixels": 2, "stored": 2}
    for index, path in enumerate(sorted((folder / "a").iterdir())):
        with Image.open(path) as image:
            assert np.array_equal(np.asarray(beton.image(index)), np.asarray(image))


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (None, [1, 1, 1, 1]),
        (SMALL.nbytes, [1, 1, 0, 0]),
        (SMALL.nbytes - 1, [0] * 4),
        (LARGE.nbytes, [1] * 4),
    ],
)
def test_smart_is_a_threshold_on_the_pixels_bytes(
    folder: Path, tmp_path: Path, threshold: int | None, expected: list[int]
) -> None:
    """FFCV: a JPEG if `image.nbytes > smart_threshold`, never without a threshold."""
    beton, found, how = modes(folder, tmp_path, write_mode="smart", smart_threshold=threshold)
    assert found == expected
    if expected == [1, 1, 0, 0]:
        assert how == {"decoded to raw pixels": 1, "stored": 2, "copied unchanged": 1}
        assert beton.stored(2) == jpeg_bytes(LARGE)


def test_proportion_is_the_same_for_any_workers_and_about_right(tmp_path: Path) -> None:
    images, labels = np.zeros((400, 4, 4, 3), np.uint8), np.zeros(400, np.int64)
    files = []
    for workers in (1, 3):
        _, found, _ = modes(
            (images, labels), tmp_path, write_mode="proportion", compress_probability=0.3, workers=workers
        )
        files.append((tmp_path / "a.beton").read_bytes())
    assert files[0] == files[1]
    assert 0.2 < 1 - np.mean(found) < 0.4
    for probability, mode in ((0, 1), (1.0, 0)):
        _, found, _ = modes(
            (images, labels), tmp_path, write_mode="proportion", compress_probability=probability
        )
        assert set(found) == {mode}


@pytest.mark.parametrize(("limit", "size"), [(91, (120, 90)), (90, (120, 90)), (45, (60, 45)), (1, (1, 1))])
def test_min_resolution_is_of_the_shorter_side_and_never_enlarges(
    tmp_path: Path, limit: int, size: tuple[int, int]
) -> None:
    images = image_folder(tmp_path / "images", {"x.jpg": jpeg_bytes(LARGE)})
    beton, _, how = modes(images, tmp_path, min_resolution=limit)
    assert (beton.widths[0], beton.heights[0]) == size
    assert how == {"copied unchanged" if limit >= 90 else "scaled down": 1}


def test_target_sizes() -> None:
    assert Encoding(min_resolution=50).target_size((400, 100)) == (200, 50)
    assert Encoding(max_resolution=50).target_size((400, 100)) == (50, 12)
    assert Encoding(max_resolution=50).target_size((4000, 10)) == (50, 1)
    assert Encoding().target_size((400, 100)) == (400, 100)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"write_mode": "jpeg"}, "write_mode='jpeg' is unknown. Did you mean 'jpg'"),
        ({"write_mode": None}, "write_mode=None is unknown"),
        ({"min_resolution": 0}, "min_resolution=0 must"),
        ({"min_resolution": 5, "max_resolution": 5}, "Pass only one of them"),
        ({"smart_threshold": -1}, "smart_threshold=-1"),
        ({"smart_threshold": 0.5}, "smart_threshold=0.5"),
        ({"check": "all"}, "check='all' is unknown. Known: decode, structure"),
        ({"compress_probability": 1.5}, r"compress_probability=1.5 must be in \[0, 1\]"),
        ({"compress_probability": float("nan")}, "compress_probability=nan"),
        ({"compress_probability": "half"}, "compress_probability='half'"),
    ],
    ids=str,
)
def test_arguments(folder: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        convert(folder, tmp_path / "a.beton", **options)
    assert list(tmp_path.iterdir()) == []
