"""`convert`: the result for each kind of source and image, and the content of the file and its manifest."""

from __future__ import annotations

import importlib.metadata
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.loaders import Beton, FFCVLoader, TorchLoader, convert, open_beton
from drivetrain.loaders.beton.manifest import manifest_path
from drivetrain.loaders.conversion.writer import PAGE_SIZE
from loader_pictures import jpeg_bytes, jpeg_folder, picture, raw_pictures
from PIL import Image


def converted(source: Any, tmp_path: Path, **options: Any) -> tuple[Beton, dict[str, int]]:
    report = convert(source, tmp_path / "out.beton", **options)
    beton = open_beton(report.path)
    assert report.samples == len(beton)
    assert report.size == report.path.stat().st_size
    assert sum(report.treatments.values()) == len(beton)
    return beton, report.treatments


def one_file(tmp_path: Path, name: str, image: Image.Image | bytes, **options: Any) -> Path:
    """A folder with one class and one image file in it."""
    folder = tmp_path / "source" / "class"
    folder.mkdir(parents=True)
    if isinstance(image, bytes):
        (folder / name).write_bytes(image)
    else:
        image.save(folder / name, **options)
    return tmp_path / "source"


def near(beton: Beton, expected: np.ndarray, mean: float = 3.0) -> None:
    """JPEG is lossy: the pictures must agree on average, and in size exactly."""
    found = np.asarray(beton.image(0)).astype(int)
    assert found.shape == expected.shape
    assert np.abs(found - expected.astype(int)).mean() < mean


PICTURE = picture(3, 90, 120)


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}]
)
def test_jpeg_passes_byte_for_byte(tmp_path: Path, options: dict[str, Any]) -> None:
    data = jpeg_bytes(PICTURE, **options)
    beton, how = converted(one_file(tmp_path, "a.JPG", data), tmp_path, quality=10, keep_bytes=True)
    assert how == {"copied unchanged": 1}
    assert beton.stored(0) == data
    assert (beton.widths[0], beton.heights[0]) == (120, 90)


@pytest.mark.parametrize("name", ["grey.jpg", "grey.png"])
def test_grey(tmp_path: Path, name: str) -> None:
    grey = Image.fromarray(PICTURE).convert("L")
    beton, how = converted(one_file(tmp_path, name, grey), tmp_path)
    assert how == {"converted from L": 1}
    near(beton, np.repeat(np.asarray(grey)[:, :, None], 3, axis=2))


@pytest.mark.parametrize("shape", [(2, 12, 10), (2, 12, 10, 1), (2, 1, 12, 10)])
def test_grey_arrays_become_rgb(tmp_path: Path, shape: tuple[int, ...]) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (2, 12, 10), dtype=np.uint8)
    convert((grey.reshape(shape), np.arange(2)), tmp_path / "grey.beton")
    beton = open_beton(tmp_path / "grey.beton")
    for number in range(2):
        assert np.array_equal(np.asarray(beton.image(number)), np.repeat(grey[number, :, :, None], 3, axis=2))


def test_cmyk_jpeg(tmp_path: Path) -> None:
    cmyk = Image.fromarray(PICTURE).convert("CMYK")
    beton, how = converted(one_file(tmp_path, "c.jpg", cmyk, quality=95), tmp_path, quality=95)
    assert how == {"converted from CMYK": 1}
    near(beton, PICTURE)


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "1"])
def test_png_modes(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(PICTURE[:50, :60]).convert(mode)  # small enough to be stored raw
    beton, how = converted(one_file(tmp_path, "a.png", image), tmp_path)
    assert how == {f"converted from {mode}": 1}
    assert np.array_equal(np.asarray(beton.image(0)), np.asarray(image.convert("RGB")))


def test_png_of_16_bits_keeps_its_levels(tmp_path: Path) -> None:
    levels = np.linspace(0, 65535, 90 * 120).astype(np.uint16).reshape(90, 120)
    beton, how = converted(one_file(tmp_path, "deep.png", Image.fromarray(levels)), tmp_path)
    assert how == {"converted from 16 bits": 1}
    near(beton, np.repeat((levels >> 8)[:, :, None], 3, axis=2))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_exif_orientation(tmp_path: Path, orientation: int, name: str) -> None:
    turned = {
        1: PICTURE, 2: PICTURE[:, ::-1], 3: PICTURE[::-1, ::-1], 4: PICTURE[::-1],
        5: PICTURE.transpose(1, 0, 2), 6: PICTURE.transpose(1, 0, 2)[:, ::-1],
        7: PICTURE.transpose(1, 0, 2)[::-1, ::-1], 8: PICTURE.transpose(1, 0, 2)[::-1],
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    source = one_file(tmp_path, name, Image.fromarray(PICTURE), exif=exif)
    beton, how = converted(source, tmp_path, quality=95)
    near(beton, turned)
    if orientation > 1:
        assert how == {"rotated upright (EXIF)": 1}
    else:
        assert how == {"copied unchanged" if name == "a.jpg" else "stored": 1}


@pytest.mark.parametrize(("limit", "size"), [(120, (120, 90)), (119, (119, 89)), (60, (60, 45)), (1, (1, 1))])
def test_max_resolution(tmp_path: Path, limit: int, size: tuple[int, int]) -> None:
    source = one_file(tmp_path, "a.jpg", jpeg_bytes(PICTURE))
    beton, how = converted(source, tmp_path, max_resolution=limit)
    assert (int(beton.widths[0]), int(beton.heights[0])) == size
    assert how == {"copied unchanged" if limit == 120 else "scaled down": 1}
    expected = Image.fromarray(PICTURE).resize(size, Image.Resampling.BOX)
    near(beton, np.asarray(expected), mean=4.0)


def test_quality_is_used(tmp_path: Path) -> None:
    sizes = []
    for quality in (20, 90):
        converted((PICTURE[None], np.array([0])), tmp_path, quality=quality)
        sizes.append(len(open_beton(tmp_path / "out.beton").stored(0)))
    assert sizes[0] < sizes[1] / 2


def test_damaged_but_readable_jpeg_is_mended_and_counted(tmp_path: Path) -> None:
    """Pillow reads it without a word; the loader's decoder would complain at every epoch."""
    data = bytearray(jpeg_bytes(PICTURE))
    at = data.index(b"\xff\xda") + 200
    data[at : at + 6] = b"\xff\xd3\xff\xd4\xff\xd5"  # restart markers that do not belong there
    beton, how = converted(one_file(tmp_path, "a.jpg", bytes(data)), tmp_path)
    assert how == {"re-encoded: its JPEG decoded with a warning": 1}
    assert beton.stored(0) != bytes(data)
    with FFCVLoader(beton.path, batch_size=1, image_size=32, workers=1) as loader:
        assert len(list(loader)) == 1


# Sources

IMAGES, LABELS = raw_pictures(7, 12)


class Pairs:
    """An indexed data set, no more than that."""

    classes = ("a", "b", "c", "d", "e", "f", "g")

    def __init__(self, form: str) -> None:
        self.form = form

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        if self.form == "dict":
            return {"img": Image.fromarray(IMAGES[index]), "label": np.int32(index)}
        if self.form == "list":
            return [IMAGES[index], torch.tensor(index)]
        return Image.fromarray(IMAGES[index]), index


@pytest.mark.parametrize(
    "source",
    [
        (IMAGES, LABELS),
        (IMAGES.transpose(0, 3, 1, 2), LABELS.astype(np.uint8)),
        (torch.from_numpy(IMAGES), torch.from_numpy(LABELS)),
        (torch.from_numpy(IMAGES).permute(0, 3, 1, 2), torch.from_numpy(LABELS)),
        (np.asfortranarray(IMAGES), LABELS[::1]),
        Pairs("tuple"),
        Pairs("list"),
        Pairs("dict"),
    ],
    ids=["hwc", "chw", "torch", "torch-chw", "fortran", "tuples", "lists", "dicts"],
)
def test_sources_store_small_images_exactly(tmp_path: Path, source: Any) -> None:
    beton, how = converted(source, tmp_path)
    assert how == {"stored": 7}
    assert beton.labels.tolist() == LABELS.tolist()
    for index in range(7):
        assert np.array_equal(np.asarray(beton.image(index)), IMAGES[index])
    assert beton.classes == (list(Pairs.classes) if isinstance(source, Pairs) else [])
    assert beton.num_classes == 7


def test_grey_arrays_and_given_classes(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(9)]
    beton, _ = converted((IMAGES[..., 0], LABELS), tmp_path, classes=names)
    assert np.array_equal(np.asarray(beton.image(3)), np.repeat(IMAGES[3, :, :, :1], 3, axis=2))
    assert beton.classes == names
    assert beton.num_classes == 9


def test_small_png_files_are_exact_too(tmp_path: Path) -> None:
    beton, how = converted(one_file(tmp_path, "a.png", Image.fromarray(IMAGES[2])), tmp_path)
    assert how == {"stored": 1}
    assert np.array_equal(np.asarray(beton.image(0)), IMAGES[2])


def test_folder_is_numbered_by_sorted_class_and_name(tmp_path: Path) -> None:
    folder = jpeg_folder(tmp_path / "images", per_class=3)
    nested = folder / "ant" / "deeper"
    nested.mkdir()
    (nested / "x.jpeg").write_bytes(jpeg_bytes(PICTURE))
    (folder / "ant" / "notes.txt").write_text("no picture, and no error")
    (folder / "README.md").write_text("nor this")
    beton, _ = converted(folder, tmp_path)
    assert beton.labels.tolist() == [0] * 4 + [1] * 3 + [2] * 3
    assert beton.classes == ["ant", "bee", "cat"]
    files = sorted((folder / "ant").rglob("*.jp*g"))
    assert [beton.stored(index) for index in range(4)] == [file.read_bytes() for file in files]


def test_same_bytes_for_any_number_of_workers(tmp_path: Path) -> None:
    folder = jpeg_folder(tmp_path / "images")
    (folder / "bee" / "broken.jpg").write_bytes(b"no picture")
    Image.fromarray(PICTURE).save(folder / "cat" / "big.png")
    results = []
    for workers in (1, 2, 5):
        out = tmp_path / f"{workers}.beton"
        report = convert(folder, out, workers=workers, on_error="skip")
        assert [Path(name).name for name, _ in report.skipped] == ["broken.jpg"]
        results.append((out.read_bytes(), manifest_path(out).read_bytes()))
    assert results[0] == results[1] == results[2]


def test_manifest(tmp_path: Path) -> None:
    folder = jpeg_folder(tmp_path / "images")
    Image.fromarray(IMAGES[0]).save(folder / "cat" / "small.png")
    beton, how = converted(folder, tmp_path, max_resolution=100, quality=77)
    text = manifest_path(beton.path).read_text()
    manifest = json.loads(text)
    assert manifest == beton.manifest
    assert manifest["samples"] == 19
    assert manifest["fields"] == {"image": "rgb_image", "label": "int"}
    assert manifest["page_size"] == beton.page_size == PAGE_SIZE
    assert manifest["stored"] == how
    assert set(how) == {"copied unchanged", "scaled down", "stored"}
    assert manifest["classes"] == ["ant", "bee", "cat"]
    assert manifest["source"] == f"folder {folder}"
    assert manifest["drivetrain"] == importlib.metadata.version("drivetrain")
    assert manifest["settings"] == {
        "max_resolution": 100, "min_resolution": None, "quality": 77, "write_mode": "auto",
        "smart_threshold": None, "compress_probability": 0.5, "check": "decode",
        "optimize": False, "keep_bytes": False, "image_mode": None,
    }  # fmt: skip
    for index in range(19):
        label = beton.labels[index]
        assert manifest["crc32"][index] == beton.checksum(index)
        assert manifest["crc32"][index] == zlib.crc32(beton.stored(index) + int(label).to_bytes(8, "little"))


def test_float_labels_are_targets(tmp_path: Path) -> None:
    beton, _ = converted((IMAGES, np.linspace(-1, 1, 7)), tmp_path)
    assert beton.labels.tolist() == np.linspace(-1, 1, 7).tolist()
    assert beton.manifest["fields"]["label"] == "float"
    for index in range(7):
        assert beton.manifest["crc32"][index] == zlib.crc32(
            beton.stored(index) + struct.pack("<d", beton.labels[index])
        )


def test_labels_too_small_for_float32_count_as_zero(tmp_path: Path) -> None:
    beton, _ = converted((IMAGES[:2], np.array([1e-300, 0.5])), tmp_path)
    assert beton.labels.tolist() == [0.0, 0.5]


def test_page_grows_with_the_largest_sample(tmp_path: Path) -> None:
    """A JPEG of more than 8 MiB, after small ones."""
    folder = one_file(tmp_path, "a.jpg", jpeg_bytes(PICTURE))
    noise = np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), np.uint8)
    large = jpeg_bytes(noise, quality=100, subsampling=0)
    assert PAGE_SIZE < len(large) < 2 * PAGE_SIZE
    (folder / "class" / "b.jpg").write_bytes(large)
    beton, how = converted(folder, tmp_path)
    assert beton.page_size == 2 * PAGE_SIZE
    assert beton.stored(1) == large
    assert how == {"copied unchanged": 2}


def test_report_reads_well(tmp_path: Path) -> None:
    report = convert(jpeg_folder(tmp_path / "images"), tmp_path / "out.beton")
    assert "18 images (all copied unchanged)" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["path"] == str(tmp_path / "out.beton")


def test_hidden_folders_and_files_are_left_out(tmp_path: Path) -> None:
    """Leftovers of notebooks and macOS are neither classes nor samples, for both readers of folders."""
    root = jpeg_folder(tmp_path / "images", per_class=2)
    picture = (root / "cat" / "000.jpg").read_bytes()
    for hidden in (".ipynb_checkpoints", "__MACOSX", "cat/.thumbnails", "bee/__MACOSX"):
        (root / hidden).mkdir()
        (root / hidden / "000.jpg").write_bytes(picture)
    (root / "cat" / "._000.jpg").write_bytes(b"\0\5\26\7")
    report = convert(root, tmp_path / "out.beton")
    with TorchLoader(root, batch_size=2, image_size=16, workers=0, train=False) as loader:
        assert loader.classes == report.classes
        assert loader.labels.tolist() == open_beton(tmp_path / "out.beton").labels.tolist()
        assert sum(len(labels) for _, labels in loader) == report.samples == 2 * len(report.classes)
    assert report.classes == ["ant", "bee", "cat"]
