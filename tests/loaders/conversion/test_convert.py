"""`convert`: the result for each kind of source and image, and the content of the file and its manifest."""

import importlib.metadata
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import DataError
from drivetrain.loaders import Beton, FFCVLoader, TorchLoader, convert, open_beton
from drivetrain.loaders.beton.manifest import manifest_path
from drivetrain.loaders.conversion.encode import Encoding, encode_image
from drivetrain.loaders.conversion.writer import PAGE_SIZE
from loader_pictures import beton_of, image_folder, jpeg_bytes, jpeg_folder, picture, raw_pictures, refused
from PIL import Image, PngImagePlugin
from torchvision.datasets import ImageFolder


def converted(source: Any, tmp_path: Path, **options: Any) -> tuple[Beton, dict[str, int]]:
    report = convert(source, tmp_path / "out.beton", **options)
    beton = open_beton(report.path)
    assert report.samples == len(beton)
    assert report.size == report.path.stat().st_size
    assert sum(report.treatments.values()) == len(beton)
    counts = {"jpg": (beton.modes == 0).sum(), "raw": beton.modes.sum()}
    assert report.modes == {name: count for name, count in counts.items() if count}
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


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}])
def test_jpeg_passes_byte_for_byte(tmp_path: Path, options: dict[str, Any]) -> None:
    data = jpeg_bytes(PICTURE, **options)
    beton, how = converted(one_file(tmp_path, "a.JPG", data), tmp_path, quality=10, keep_bytes=True)
    assert how == {"copied unchanged": 1}
    assert beton.stored(0) == data
    assert (beton.widths[0], beton.heights[0]) == (120, 90)


GRAY = Image.fromarray(PICTURE).convert("L")
LEVELS = np.linspace(0, 65535, 90 * 120).astype(np.uint16).reshape(90, 120)


@pytest.mark.parametrize(
    ("name", "image", "treatment", "expected"),
    [
        ("gray.jpg", GRAY, "converted from L", np.asarray(GRAY.convert("RGB"))),
        ("gray.png", GRAY, "converted from L", np.asarray(GRAY.convert("RGB"))),
        ("c.jpg", Image.fromarray(PICTURE).convert("CMYK"), "converted from CMYK", PICTURE),
        ("deep.png", Image.fromarray(LEVELS), "converted from 16 bits", np.stack([LEVELS >> 8] * 3, axis=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_become_rgb(tmp_path: Path, name: str, image: Any, treatment: str, expected: Any) -> None:
    options = {"quality": 95} if name == "c.jpg" else {}
    beton, how = converted(one_file(tmp_path, name, image, **options), tmp_path, **options)
    assert how == {treatment: 1}
    near(beton, expected)


@pytest.mark.parametrize("opened", [False, True])
def test_images_longer_than_a_jpeg(tmp_path: Path, opened: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1, 65_501, 3), dtype=np.uint8)
    sample = [(Image.fromarray(pixels) if opened else pixels, 0)]
    assert np.array_equal(beton_of(sample, tmp_path / "long.beton").pixels(0), pixels)
    with pytest.raises(DataError, match=r"longest side is 65501 pixels; a JPEG has at most 65500.*write_mode='raw'"):
        convert(sample, tmp_path / "jpg.beton", write_mode="jpg")
    assert beton_of([(pixels[:, 1:], 0)], tmp_path / "longest.beton").modes[0] == 0


@pytest.mark.parametrize("shape", [(2, 12, 10), (2, 12, 10, 1), (2, 1, 12, 10)])
def test_gray_arrays_become_rgb(tmp_path: Path, shape: tuple[int, ...]) -> None:
    gray = np.random.default_rng(0).integers(0, 256, (2, 12, 10), dtype=np.uint8)
    beton = beton_of((gray.reshape(shape), np.arange(2)), tmp_path / "gray.beton")
    for number in range(2):
        assert np.array_equal(np.asarray(beton.image(number)), np.repeat(gray[number, :, :, None], 3, axis=2))


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "1"])
def test_png_modes(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(PICTURE[:50, :60]).convert(mode)  # small enough to be stored raw
    beton, how = converted(one_file(tmp_path, "a.png", image), tmp_path)
    assert how == {f"converted from {mode}": 1}
    assert np.array_equal(np.asarray(beton.image(0)), np.asarray(image.convert("RGB")))


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
        assert how == {"copied unchanged" if name == "a.jpg" else "compressed as JPEG": 1}


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


def test_gray_arrays_and_given_classes(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(9)]
    beton, _ = converted((IMAGES[..., 0], LABELS), tmp_path, classes=names)
    assert np.array_equal(np.asarray(beton.image(3)), np.repeat(IMAGES[3, :, :, :1], 3, axis=2))
    assert beton.classes == names
    assert beton.num_classes == 9


class Counted(list[Any]):
    """A data set whose `classes` are no names."""

    classes = 7


def test_a_number_of_classes_is_no_names(tmp_path: Path) -> None:
    beton, _ = converted(Counted(zip(IMAGES, LABELS, strict=True)), tmp_path)
    assert beton.classes == []
    assert beton.num_classes == 7


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
    assert {key: value for key, value in manifest.items() if key not in ("blocks", "crc32")} == beton.manifest
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


def test_names_that_a_data_set_has_are_not_those_of_targets(tmp_path: Path) -> None:
    class Named(list[Any]):
        classes = ("ant", "bee")

    beton, _ = converted(Named(zip(IMAGES, np.linspace(-1, 1, 7).tolist(), strict=True)), tmp_path)
    assert (beton.classes, beton.num_classes) == ([], 1)


@pytest.mark.parametrize(("values", "names"), [(2, []), (3, ["ant", "bee", "cat"])])
def test_names_that_a_data_set_has_are_those_of_vectors_of_as_many_values(
    tmp_path: Path, values: int, names: list[str]
) -> None:
    class Named(list[Any]):
        classes = ("ant", "bee", "cat")

    beton, _ = converted(Named(zip(IMAGES, np.eye(values)[LABELS % values], strict=True)), tmp_path)
    assert (beton.classes, beton.num_classes) == (names, values)


def test_float_labels_are_targets(tmp_path: Path) -> None:
    beton, _ = converted((IMAGES, np.linspace(-1, 1, 7)), tmp_path)
    assert beton.labels.tolist() == np.linspace(-1, 1, 7).tolist()
    assert beton.manifest["fields"]["label"] == "float"
    for index in range(7):
        assert beton.checksums is not None
        assert beton.checksums[index] == zlib.crc32(beton.stored(index) + struct.pack("<d", beton.labels[index]))


def test_names_are_not_those_of_targets_of_which_the_first_is_a_whole_number(tmp_path: Path) -> None:
    class Named(list[Any]):
        classes = ("ant", "bee")

    report = convert(Named(zip(IMAGES, [0, 1, 0.5, 1, 0, 1, 0], strict=True)), tmp_path / "a.beton", progress=False)
    beton = open_beton(tmp_path / "a.beton")
    assert report.classes == beton.classes == []
    assert beton.num_classes == 1


def test_files_have_labels_of_one_kind(tmp_path: Path) -> None:
    def written(*labels: float) -> list[Any]:
        data = [(picture(0, 8, 8), label) for label in labels]
        convert(data, tmp_path / "part-{0..1}.beton", progress=False)
        return [open_beton(tmp_path / f"part-{number}.beton").labels.tolist() for number in range(2)]

    assert written(1, 2.5, 3, 4) == [[1.0, 2.5], [3.0, 4.0]]
    before = (tmp_path / "part-1.beton").read_bytes()
    with pytest.raises(DataError, match=r"part-1\.beton has labels with fractions, .* Make the first label a float"):
        written(1, 2, 2.5, 3)
    assert (tmp_path / "part-1.beton").read_bytes() == before


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


def test_folders_that_are_links_are_followed(tmp_path: Path) -> None:
    """As by torchvision's ImageFolder; a link to a folder above it would be followed again and again."""
    root = jpeg_folder(tmp_path / "images", per_class=2)
    (root / "cat" / "more").symlink_to(jpeg_folder(tmp_path / "others", per_class=1))
    assert convert(root, tmp_path / "out.beton").samples == len(ImageFolder(str(root))) == 9
    for above in (root / "cat", root):
        (root / "cat" / "up").symlink_to(above)
        refused(root, tmp_path, "up is a link to a folder that it is in")
        (root / "cat" / "up").unlink()


def test_files_of_torchvisions_folder_are_copied(tmp_path: Path) -> None:
    """They are not compressed again, unless its images are not those of the files."""
    root = jpeg_folder(tmp_path / "images", per_class=2)
    data = ImageFolder(str(root))
    beton, how = converted(data, tmp_path)
    assert how == {"copied unchanged": 6}
    assert [beton.stored(index) for index in range(6)] == [Path(path).read_bytes() for path, _ in data.samples]
    assert (beton.labels.tolist(), beton.classes) == (data.targets, data.classes)
    assert isinstance(data[0][0], Image.Image)  # it is as before

    def mirrored(image: Any) -> Image.Image:
        with Image.open(image) if isinstance(image, str) else image as opened:
            return opened.transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    for changed in (ImageFolder(str(root), mirrored), ImageFolder(str(root), loader=mirrored)):
        assert converted(changed, tmp_path)[1] == {"compressed as JPEG": 6}
    (root / "bee" / "new.jpg").symlink_to(tmp_path / "gone.jpg")
    refused(ImageFolder(str(root)), tmp_path, "new.jpg cannot be read: No such file")


@pytest.mark.timeout(30)
def test_a_pipe_in_torchvisions_folder_is_not_waited_for(tmp_path: Path) -> None:
    """Of its images, `convert` takes the files."""
    os.mkfifo(tmp_path / "x.jpg")
    with pytest.raises(DataError, match="not an image that Pillow can read"):
        encode_image({"bytes": None, "path": str(tmp_path / "x.jpg")}, Encoding())


def test_labels_of_pandas_are_taken_by_their_places(tmp_path: Path) -> None:
    """Not by their names, which are others once rows were left out or shuffled."""
    pd, (images, _) = pytest.importorskip("pandas"), raw_pictures(3)
    for labels in (pd.Series([5, 3, 4], index=[2, 0, 1]), pd.DataFrame({"x": [5, 3, 4], "y": [0, 1, 2]})):
        convert((images, labels), tmp_path / "out.beton")
        assert open_beton(tmp_path / "out.beton").labels.tolist() == labels.to_numpy().tolist()


# Write modes and resolutions, compared with those of FFCV's RGBImageField

SMALL, LARGE = picture(1, 20, 24), picture(2, 90, 120)


@pytest.fixture(scope="module")
def modes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small and a large picture, each as JPEG and as PNG: `1-small.jpg`, `2-small.png`, `3-…`, `4-large.png`."""
    root = tmp_path_factory.mktemp("modes") / "images"
    (root / "a").mkdir(parents=True)
    for number, pixels in ((1, SMALL), (3, LARGE)):
        (root / "a" / f"{number}.jpg").write_bytes(jpeg_bytes(pixels))
        Image.fromarray(pixels).save(root / "a" / f"{number + 1}.png")
    return root


def modes(source: Any, tmp_path: Path, **options: Any) -> tuple[Beton, list[int], dict[str, int]]:
    beton, how = converted(source, tmp_path, **options)
    return beton, beton.modes.tolist(), how


@pytest.mark.parametrize(
    ("write_mode", "expected", "treatments"),
    [
        ("auto", [0, 1, 0, 0], {"copied unchanged": 2, "stored": 1, "compressed as JPEG": 1}),
        ("jpg", [0, 0, 0, 0], {"copied unchanged": 2, "compressed as JPEG": 2}),
        ("raw", [1, 1, 1, 1], {"decoded to raw pixels": 2, "stored": 2}),
    ],
)
def test_write_modes(
    modes_folder: Path, tmp_path: Path, write_mode: str, expected: list[int], treatments: dict[str, int]
) -> None:
    """JPEG files stay as they are, or their pixels are stored as they decode."""
    beton, found, how = modes(modes_folder, tmp_path, write_mode=write_mode)
    assert (found, how) == (expected, treatments)
    for index, path in enumerate(sorted((modes_folder / "a").iterdir())):
        if write_mode == "raw":
            assert np.array_equal(np.asarray(beton.image(index)), np.asarray(Image.open(path)))
        elif path.suffix == ".jpg":
            assert beton.stored(index) == path.read_bytes()


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(None, [1] * 4), (SMALL.nbytes, [1, 1, 0, 0]), (SMALL.nbytes - 1, [0] * 4), (LARGE.nbytes, [1] * 4)],
)
def test_smart(modes_folder: Path, tmp_path: Path, threshold: int | None, expected: list[int]) -> None:
    """FFCV: a JPEG if `image.nbytes > smart_threshold`, never without a threshold."""
    beton, found, how = modes(modes_folder, tmp_path, write_mode="smart", smart_threshold=threshold)
    assert found == expected
    if expected == [1, 1, 0, 0]:
        assert how == {"decoded to raw pixels": 1, "stored": 1, "compressed as JPEG": 1, "copied unchanged": 1}
        assert beton.stored(2) == jpeg_bytes(LARGE)


def test_proportion_is_the_same_for_any_workers_and_about_right(tmp_path: Path) -> None:
    source, files = (np.zeros((400, 4, 4, 3), np.uint8), np.zeros(400, np.int64)), []
    options: dict[str, Any] = {"write_mode": "proportion", "compress_probability": 0.3}
    for workers in (1, 3):
        _, found, _ = modes(source, tmp_path, workers=workers, **options)
        files.append((tmp_path / "out.beton").read_bytes())
    assert files[0] == files[1]
    assert 0.2 < 1 - np.mean(found) < 0.4
    for probability, mode in ((0, 1), (1.0, 0)):
        _, found, _ = modes(source, tmp_path, **options | {"compress_probability": probability})
        assert set(found) == {mode}


@pytest.mark.parametrize(("limit", "size"), [(91, (120, 90)), (90, (120, 90)), (45, (60, 45)), (1, (1, 1))])
def test_min_resolution(tmp_path: Path, limit: int, size: tuple[int, int]) -> None:
    """It is of the shorter side, and never enlarges."""
    images = image_folder(tmp_path / "images", {"x.jpg": jpeg_bytes(LARGE)})
    beton, _, how = modes(images, tmp_path, min_resolution=limit)
    assert (beton.widths[0], beton.heights[0]) == size
    assert how == {"copied unchanged" if limit >= 90 else "scaled down": 1}


def test_target_sizes() -> None:
    assert Encoding(min_resolution=50).target_size((400, 100)) == (200, 50)
    assert Encoding(max_resolution=50).target_size((400, 100)) == (50, 12)
    assert Encoding(max_resolution=50).target_size((4000, 10)) == (50, 1)
    assert Encoding().target_size((400, 100)) == (400, 100)


class Named(list[Any]):
    """Pairs, with names of the classes."""

    classes: Any = ()
    target_transform: Any = None
    transform: Any = None


@pytest.mark.parametrize(
    ("names", "changes", "expected"),
    [
        ([("tench", "Tinca tinca"), "dog"], None, ["tench, Tinca tinca", "dog"]),  # as torchvision's ImageNet
        (np.array(["ant", "bee"]), None, ["ant", "bee"]),
        (["ant", "bee"], lambda label: 1 - label, []),  # they are those of the labels before
    ],
)
def test_names_of_a_data_set(tmp_path: Path, names: Any, changes: Any, expected: list[str]) -> None:
    source = Named((picture(number, 12, 12), number % 2) for number in range(4))
    source.classes, source.target_transform = names, changes
    assert beton_of(source, tmp_path / "a.beton").classes == expected
    with TorchLoader(source, batch_size=2, image_size=8, workers=0) as loader:
        assert loader.classes == expected


def test_comments_are_dropped(tmp_path: Path) -> None:
    """Of pictures that are encoded; a JPEG has no room for a long one."""
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "long " * 20_000)
    beton, _ = converted(one_file(tmp_path, "a.png", Image.fromarray(PICTURE), pnginfo=text), tmp_path)
    near(beton, PICTURE)
    assert b"long " not in beton.stored(0)
