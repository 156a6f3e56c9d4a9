"""`inspect`, `verify` and the contact sheet, on real files and on damaged ones."""

from pathlib import Path

import numpy as np
import pytest
from command_line import call
from drivetrain import BetonError, DataError
from drivetrain.loaders import contact_sheet, convert, inspect, open_beton, verify
from loader_pictures import jpeg_beton, jpeg_bytes, npy_bytes, picture, raw_pictures, tar_file
from PIL import Image


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eighteen JPEGs of three classes."""
    return jpeg_beton(tmp_path / "photos.beton")


def damage(path: Path, sample: int, *, offset: float) -> None:
    """Overwrite four bytes of a sample's image, `offset` of its length into it."""
    beton = open_beton(path)
    at = int(beton.pointers[sample] + int(offset * beton.sizes[sample]))
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(4)
        file.seek(at)
        file.write(bytes(255 - value for value in old))


def test_inspection_counts_what_is_there(photos: Path) -> None:
    found = inspect(photos)
    assert (found.samples, found.jpegs, found.raws, found.checked) == (18, 18, 0, True)
    assert found.classes == {"ant": 6, "bee": 6, "cat": 6}
    assert found.fields == {"image": "rgb_image", "label": "int"}
    beton = open_beton(photos)
    assert found.width.largest == beton.widths.max()
    assert found.image_bytes.mean == pytest.approx(beton.sizes.mean())
    assert found.size == photos.stat().st_size
    assert "cat: 6" in str(found)


def test_inspection_without_a_manifest_numbers_the_classes(tmp_path: Path) -> None:
    images, _ = raw_pictures(6, 16)
    convert((images, np.array([0, 0, 2, 2, 2, 1])), tmp_path / "a.beton")
    (tmp_path / "a.beton.json").unlink()
    found = inspect(tmp_path / "a.beton")
    assert (found.classes, found.checked, found.raws) == ({"0": 2, "1": 1, "2": 3}, False, 6)
    assert verify(tmp_path / "a.beton").sound


def test_classes_of_one_name_are_counted_apart(tmp_path: Path) -> None:
    images, masks = raw_pictures(3, 16)[0], np.zeros((3, 16, 16), np.uint8)
    masks[:, 4:], masks[:, 12:] = 2, 1
    for labels, counts in ((np.array([0, 2, 2]), (1, 0, 2)), (masks, (192, 192, 384))):
        convert((images, labels), tmp_path / "a.beton", classes=["crane", "x", "crane"])
        found = inspect(tmp_path / "a.beton")
        counted = found.masks["label"].classes if found.masks else found.classes
        assert counted == dict(zip(("crane (0)", "x", "crane (2)"), counts, strict=True))


def test_float_labels_have_no_classes(tmp_path: Path) -> None:
    images, _ = raw_pictures(3, 16)
    convert((images, np.array([0.5, 1.5, -2.0])), tmp_path / "a.beton")
    assert inspect(tmp_path / "a.beton").classes == {}
    assert verify(tmp_path / "a.beton").sound


def test_verify_names_each_changed_sample_and_no_other(photos: Path) -> None:
    assert verify(photos).sound
    damage(photos, 3, offset=0.7)
    damage(photos, 11, offset=0.5)
    found = verify(photos, workers=2)
    assert [number for number, _ in found.bad] == [3, 11]
    assert all("checksum" in reason for _, reason in found.bad)


def test_verify_without_checksums_still_decodes(photos: Path) -> None:
    photos.with_name("photos.beton.json").unlink()
    damage(photos, 5, offset=0.0)  # the JPEG's first bytes
    found = verify(photos)
    assert [number for number, _ in found.bad] == [5]
    assert not found.checked


@pytest.mark.parametrize("workers", [0, -1, 1.5])
def test_a_number_of_threads_that_is_none_is_refused(photos: Path, workers: int) -> None:
    with pytest.raises(DataError, match=f"workers={workers} must be a positive integer, or None"):
        verify(photos, workers=workers)


def test_contact_sheet_shows_pictures_in_a_grid(photos: Path, tmp_path: Path) -> None:
    contact_sheet(photos, tmp_path / "sheet.png", columns=4, rows=3, side=64)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (4 * 64, 3 * 78)
        pixels = np.asarray(sheet)
    beton = open_beton(photos)
    small = beton.image(0)
    small.thumbnail((60, 60))
    shown = pixels[(64 - small.height) // 2 :, (64 - small.width) // 2 :][: small.height, : small.width]
    assert np.array_equal(shown, np.asarray(small))
    with pytest.raises(DataError, match=r"\.png"):
        contact_sheet(photos, tmp_path / "sheet.jpg")
    for wrong in ({"columns": 0}, {"rows": -1}, {"side": 2}, {"side": 64.5}):
        ((name, value),) = wrong.items()
        with pytest.raises(DataError, match=f"{name}={value} must be an? (positive )?integer"):
            contact_sheet(photos, tmp_path / "other.png", **wrong)
    assert not (tmp_path / "other.png").exists()


def test_command_line(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = call("inspect", str(photos), "--sheet", "sheet.png")
    assert shown.code == 0, shown.err
    assert "18 samples" in shown.out
    assert (tmp_path / "sheet.png").exists()
    assert call("verify", str(photos)).code == 0
    damage(photos, 7, offset=0.6)
    bad = call("verify", str(photos))
    assert bad.code == 1
    assert "sample 7" in bad.out
    missing = call("verify", "none.beton")
    assert missing.code == 1
    assert missing.err.startswith("BetonError")


def test_an_unsound_structure_is_an_error(photos: Path) -> None:
    with photos.open("r+b") as file:
        file.truncate(1000)
    for function in (inspect, verify):
        with pytest.raises(BetonError, match="truncated"):
            function(photos)


def test_command_line_with_shards_fields_and_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of input of `convert`, then the result of `inspect`."""
    for number in range(2):
        members: dict[str, bytes] = {}
        for key in range(3):
            members |= {
                f"{key}.jpg": jpeg_bytes(picture(key, 80, 100)), f"{key}.cls": b"%d" % key,
                f"{key}.txt": b"word" * key, f"{key}.npy": npy_bytes(np.full(4, key, np.float32)),
            }  # fmt: skip
        tar_file(tmp_path / f"s-{number}.tar", members)

    monkeypatch.chdir(tmp_path)
    done = call(
        "convert", "s-{0..1}.tar", "a.beton", "--field", "npy=ndarray", "--field", "txt", "--write-mode", "smart",
        "--smart-threshold", "100", "--min-resolution", "40",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "6 images (all scaled down)" in done.out
    beton = open_beton(tmp_path / "a.beton")
    assert beton.fields == {"image": "rgb_image", "label": "int", "npy": "ndarray", "txt": "bytes"}
    assert set(beton.heights.tolist()) == {40}
    shown = call("inspect", "a.beton", "--sheet", "sheet.png")
    assert "npy (ndarray float32 (4,)), txt (bytes)" in shown.out
    twice = call("convert", "s-0.tar", "b.beton", "--field", "txt", "--field", "txt=json")
    assert twice.code == 1
    assert "DataError: --field names one field twice" in twice.err


def test_contact_sheet_with_vector_labels(tmp_path: Path) -> None:
    images, _ = raw_pictures(3, 16)
    convert((images, np.eye(3)), tmp_path / "a.beton", classes=["a", "b", "c"])
    contact_sheet(tmp_path / "a.beton", tmp_path / "sheet.png", side=64)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (3 * 64, 78)


def test_labels_without_classes_may_be_any_number(tmp_path: Path) -> None:
    """Of stock FFCV, say: neither small nor positive."""
    images, _ = raw_pictures(2, 16)
    convert((images, np.array([0, (1 << 31) - 1])), tmp_path / "a.beton")
    assert inspect(tmp_path / "a.beton").classes == {"0": 1, str((1 << 31) - 1): 1}
