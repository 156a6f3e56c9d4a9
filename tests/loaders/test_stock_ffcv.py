"""Compatibility with stock FFCV: it reads our files with the same pixels, we read its files, and both loaders run in
one process, although a stock one changes types that numba shares."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from drivetrain.loaders import FFCVLoader, convert, open_beton
from loader_pictures import jpeg_beton, jpeg_bytes, jpeg_folder, picture, raw_pictures, run_script
from PIL import Image
from process_state import output_of

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`raw.beton` and `mixed.beton` of ours, `theirs.beton`, and an `.npz` of what stock FFCV reads of each."""
    root = tmp_path_factory.mktemp("stock")
    convert(raw_pictures(10, 16), root / "raw.beton")
    report = convert(mixed_images(root), root / "mixed.beton", on_error="skip")
    assert (report.samples, len(report.skipped)) == (25, 1)
    run_script("loader_stock_ffcv.py", root)
    return root


def mixed_images(root: Path) -> Path:
    """JPEG files passed through (baseline, progressive) and encoded, small pictures, and one broken file."""
    images = jpeg_folder(root / "images")
    (images / "ant" / "progressive.jpg").write_bytes(jpeg_bytes(picture(7, 90, 90), progressive=True))
    (images / "bee" / "broken.jpg").write_bytes(b"not a picture")
    Image.fromarray(picture(8, 100, 80)).convert("L").save(images / "cat" / "gray.jpg")
    Image.fromarray(picture(9, 30, 40)).save(images / "cat" / "small.png")
    noise = np.random.default_rng(0).integers(0, 256, (1400, 1000, 3), np.uint8)
    for number in range(4):  # three megabytes each: pages end within the file
        Image.fromarray(noise).save(images / "cat" / f"noise{number}.jpg", quality=97, subsampling=0)
    return images


def ours(path: Path, side: int) -> tuple[np.ndarray, list[int]]:
    options = {"train": False, "eval_ratio": 1.0, "dtype": torch.uint8, "interpolation": "area"}
    with FFCVLoader(path, batch_size=4, image_size=side, workers=1, **options) as loader:
        batches = list(loader)
    images = torch.cat([images for images, _ in batches]).permute(0, 2, 3, 1)
    return images.numpy(), torch.cat([labels for _, labels in batches]).tolist()


@pytest.mark.slow
@pytest.mark.process
def test_stock_reads_raw_pixels(folder: Path) -> None:
    images, labels = raw_pictures(10, 16)
    theirs = np.load(folder / "raw.npz")
    assert np.array_equal(theirs["whole"], images)
    assert theirs["labels"].tolist() == labels.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raw", "mixed", "theirs"])
def test_both_give_the_same_pixels(folder: Path, name: str) -> None:
    theirs = np.load(folder / f"{name}.npz")
    cropped, labels = ours(folder / f"{name}.beton", 32)
    assert np.array_equal(cropped, theirs["crop"])
    assert labels == theirs["labels"].tolist()


@pytest.mark.slow
def test_the_mixed_file_has_several_pages_and_both_modes(folder: Path) -> None:
    """What makes the comparison above worth something."""
    beton = open_beton(folder / "mixed.beton")
    assert len(set((beton.pointers // np.uint64(beton.page_size)).tolist())) >= 2
    assert set(beton.modes.tolist()) == {0, 1}


@pytest.mark.slow
def test_we_read_what_stock_wrote(folder: Path) -> None:
    beton = open_beton(folder / "theirs.beton")
    assert beton.labels.tolist() == [index * index for index in range(10)]
    assert beton.manifest == {}
    assert beton.classes == []
    assert beton.num_classes == 82
    assert set(beton.modes.tolist()) == {0, 1}
    for index in range(10):
        side = 20 if index < 4 else 64
        original = picture(index, side, side + 4 * (index % 3)).astype(int)
        error = np.abs(np.asarray(beton.image(index)).astype(int) - original)
        assert error.max() == 0 if beton.modes[index] == 1 else error.mean() < 4


def test_float_targets(tmp_path: Path) -> None:
    images, _ = raw_pictures(5, 16)
    targets = np.random.default_rng(0).normal(size=5)
    convert((images, targets), tmp_path / "targets.beton")
    with FFCVLoader(tmp_path / "targets.beton", batch_size=5, image_size=16, train=False) as loader:
        (_, labels), *rest = loader
    assert labels.dtype == torch.float32
    assert torch.equal(labels, torch.tensor(targets, dtype=torch.float32))
    assert rest == []


PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from drivetrain.loaders import FFCVLoader

def stock(path):
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
    from ffcv.loader import Loader
    decoders = {"image": [CenterCropRGBImageDecoder((32, 32), ratio=1.0)], "label": [IntDecoder()]}
    return sum(len(labels) for _, labels in Loader(path, 3, num_workers=2, pipelines=decoders))

def ours(path):
    options = {"batch_size": 3, "image_size": 32, "workers": 2, "policy": {"name": "aug_mix"}}
    with FFCVLoader(path, crop=sys.argv[2], **options) as loader:
        return torch.cat([images for images, _ in loader])

path, first = sys.argv[1], sys.argv[3]
before = ours(path) if first == "ours" else None
assert stock(path) == 18
after = [ours(path) for _ in range(2)]
assert torch.equal(*after)
assert before is None or torch.equal(before, after[0])
print(stock(path), len(after[0]))
"""


@pytest.mark.process
@pytest.mark.parametrize("first", ["ours", "stock"])
@pytest.mark.slow
def test_both_loaders_in_one_process(tmp_path: Path, first: str) -> None:
    path = jpeg_beton(tmp_path / "photos.beton")
    printed = output_of(sys.executable, "-c", PROGRAM, path, "resized", first, timeout=200, cwd=tmp_path)
    assert printed.split() == ["18", "18"]
