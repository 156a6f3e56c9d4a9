"""Images of one and four channels, and of 16 bits: what is stored, how FFCV reads it, and what cannot be stored."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain.common.errors import BetonError
from drivetrain.loaders import contact_sheet, convert, inspect, open_beton, verify
from drivetrain.loaders.beton.layout import Field, image_field, label_field
from drivetrain.loaders.beton.manifest import manifest_path
from drivetrain.pipeline.apps.cli import main
from loader_pictures import (
    beton_of,
    file_bytes,
    image_folder,
    jpeg_bytes,
    picture,
    png_of,
    refused,
    run_script,
)
from loader_stock_arrays import COUNT, KINDS, pixels
from numpy.typing import NDArray
from PIL import Image

SHAPE = (20, 24)
MODES = {"L": (1, 8), "RGBA": (4, 8), "I;16": (1, 16), "RGB;16": (3, 16), "RGBA;16": (4, 16)}


def levels(channels: int, depth: int, count: int = 5) -> NDArray[Any]:
    shape = (count, *SHAPE, *([channels] if channels > 1 else []))
    return np.random.default_rng(channels + depth).integers(0, 1 << depth, shape).astype(f"u{depth // 8}")


@pytest.mark.parametrize("mode", MODES)
def test_arrays_and_tensors_are_stored_as_they_are(mode: str, tmp_path: Path) -> None:
    channels, depth = MODES[mode]
    images, labels, path = levels(channels, depth), np.arange(5), tmp_path / "a.beton"
    forms: list[Any] = [images, torch.from_numpy(images)]
    forms.append(images[..., None] if channels == 1 else torch.from_numpy(np.moveaxis(images, -1, 1).copy()))
    for form in forms:
        report = convert((form, labels), path, image_mode=mode)
        assert report.modes == {"raw": 5}
        assert report.treatments == {"stored": 5}
        beton = open_beton(path)
        assert (beton.channels, beton.depth, beton.image_name) == (channels, depth, "image")
        assert (beton.label_name, beton.labels.tolist()) == ("label", [0, 1, 2, 3, 4])
        assert (set(beton.heights), set(beton.widths), set(beton.modes)) == ({20}, {24}, {1})
        for number in range(5):
            np.testing.assert_array_equal(beton.pixels(number), images[number])
        assert verify(path).sound


@pytest.mark.parametrize("mode", ["L", "RGBA", "I;16"])
def test_pillow_images_and_files(mode: str, tmp_path: Path) -> None:
    images = levels(*MODES[mode])
    pictures = [Image.fromarray(image) for image in images]
    assert {one.mode for one in pictures} == {mode}
    for data in ([(one, 0) for one in pictures], [(file_bytes(one, "PNG"), 0) for one in pictures]):
        beton = beton_of(data, tmp_path / "a.beton", image_mode=mode)
        assert beton.image(2).mode == mode
        np.testing.assert_array_equal(np.asarray(beton.image(2)), images[2])


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_channels_of_8_bits_are_converted(mode: str, tmp_path: Path) -> None:
    """Of JPEGs, pictures of other modes, and arrays; upright."""
    image = Image.fromarray(picture(3, *SHAPE))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned, jpeg = file_bytes(image.rotate(180), "PNG", exif=exif), jpeg_bytes(image)
    data: list[Any] = [
        image,
        image.convert("P"),
        np.asarray(image),
        jpeg,
        turned,
        {"bytes": jpeg, "path": None},
    ]
    report = convert([(one, 0) for one in data], tmp_path / "a.beton", image_mode=mode)
    assert report.treatments["converted from RGB"] == 5
    beton, decoded = open_beton(tmp_path / "a.beton"), Image.open(io.BytesIO(jpeg))
    for number, expected in enumerate([image, image.convert("P"), image, decoded, image, decoded]):
        np.testing.assert_array_equal(beton.pixels(number), np.asarray(expected.convert(mode)))


def test_rgb_is_the_default(tmp_path: Path) -> None:
    data = [(Image.fromarray(levels(*MODES["L"])[0]), 0), (jpeg_bytes(picture(1, 40, 30)), 1)]
    convert(data, tmp_path / "a.beton")
    convert(data, tmp_path / "b.beton", image_mode="RGB")
    assert (tmp_path / "a.beton").read_bytes() == (tmp_path / "b.beton").read_bytes()
    beton = open_beton(tmp_path / "a.beton")
    assert (beton.channels, beton.depth, beton.fields["image"]) == (3, 8, "rgb_image")
    np.testing.assert_array_equal(beton.pixels(1), np.asarray(beton.image(1)))


# A PNG of 2 × 1 pixels with 16 bits per channel, of which Pillow reads the upper 8
WIDE_RGB = png_of(16, 2, 2, 1, b"\0" + struct.pack(">6H", 1, 2, 3, 4, 5, 60000))
GRAY, WIDE = Image.fromarray(levels(1, 8)[0]), Image.fromarray(levels(1, 16)[0])


@pytest.mark.parametrize(
    ("image", "mode", "words"),
    [
        (WIDE, "L", r"more than 8 bits \(Pillow's mode I;16\), but 'L' has 8"),
        (file_bytes(WIDE, "PNG"), "RGBA", "more than 8 bits"),
        (WIDE_RGB, "L", r"more than 8 bits \(Pillow's mode RGB\)"),
        (WIDE_RGB, "RGB;16", "Pillow's mode RGB is not 'RGB;16'; pass an array of uint16"),
        (WIDE, "RGB;16", "Pillow's mode I;16 is not 'RGB;16'"),
        (GRAY, "I;16", r"have 8 bits \(Pillow's mode L\), but 'I;16' has 16"),
        (jpeg_bytes(picture(1, 20, 24)), "I;16", "8 bits"),
        (Image.new("F", (24, 20)), "I;16", "Pillow's mode F is not 'I;16'"),
        (Image.new("I", (24, 20), 70_000), "I;16", "not in 0 to 65535"),
        (np.zeros(SHAPE, np.uint16), "L", "its pixels are uint16, but 'L' has uint8"),
        (np.zeros(SHAPE, np.uint8), "I;16", "its pixels are uint8, but 'I;16' has uint16"),
        (np.zeros(SHAPE, np.float32), "L", "float32"),
        (np.zeros((*SHAPE, 3), np.uint16), "I;16", "it has 3 channels of 16 bits, but 'I;16' has 1"),
        (np.zeros((*SHAPE, 2), np.uint8), "L", r"its shape is \(20, 24, 2\)"),
        (b"no image", "L", "it is not an image that Pillow can read"),
        (file_bytes(GRAY, "PNG")[:-30], "L", "it cannot be decoded"),
        (np.zeros(SHAPE, np.uint16), None, "expected uint8, 0 to 255, or image_mode='I;16'"),
    ],
)  # fmt: skip
def test_images_of_other_kinds(image: Any, mode: str | None, words: str, tmp_path: Path) -> None:
    refused([(image, 0)], tmp_path, words, image_mode=mode)


def test_all_have_one_size(tmp_path: Path) -> None:
    data = [(GRAY, 0), (GRAY.resize((30, 40)), 0)]
    words = r"sample 1: it has 40 × 30 pixels \(height × width\), but the first sample has 20 × 24; .* resize them"
    refused(data, tmp_path, words, image_mode="L")
    report = convert(data, tmp_path / "a.beton", image_mode="L", on_error="skip")
    assert [name for name, _ in report.skipped] == ["sample 1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_mode": "LA"}, "image_mode='LA' is unknown"),
        ({"write_mode": "jpg"}, "write_mode='jpg' does not go with image_mode='L'. Leave it out"),
        (
            {"max_resolution": 10},
            "max_resolution=10 does not go with image_mode='L'. Resize the images first",
        ),
        ({"min_resolution": 10}, "min_resolution=10"),
        ({"optimize": True}, "optimize=True"),
        ({"keep_bytes": True}, "keep_bytes=True"),
    ],
)
def test_options_of_jpegs(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused([(GRAY, 0)], tmp_path, words, **{"image_mode": "L", **options})


def test_masks_and_further_fields(tmp_path: Path) -> None:
    mask = np.arange(480).reshape(SHAPE) % 4
    data = [{"image": WIDE, "label": mask, "boxes": [[1, 2, 3, 4]], "score": 0.5}]
    fields = {"boxes": "boxes", "score": None}
    beton = beton_of(data, tmp_path / "a.beton", image_mode="I;16", fields=fields)
    assert beton.fields == {"image": "ndarray", "label": "bytes", "boxes": "json", "score": "float"}
    np.testing.assert_array_equal(beton.mask("label", 0), mask)


def test_inspection(tmp_path: Path) -> None:
    path, sheet = tmp_path / "a.beton", tmp_path / "sheet.png"
    for mode, kind in MODES.items():
        images = levels(*kind)
        convert((images, np.arange(5)), path, image_mode=mode)
        found = inspect(path)
        assert (found.jpegs, found.raws, found.width.largest, found.height.largest) == (0, 5, 24, 20)
        assert found.fields["image"].startswith(f"ndarray uint{kind[1]} (20, 24")
        contact_sheet(path, sheet, side=28)
        shown = (images[0] >> (kind[1] - 8)).astype(np.uint8)
        shown = shown[..., :3] if shown.ndim == 3 else np.repeat(shown[..., None], 3, axis=2)
        np.testing.assert_array_equal(np.asarray(Image.open(sheet))[4:24, 2:26], shown)
        if mode in ("RGB;16", "RGBA;16"):
            words = r"for which Pillow has no mode\. Read an array with pixels\(index\)"
            with pytest.raises(BetonError, match=words):
                open_beton(path).image(0)


def test_a_changed_pixel_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.beton"
    convert((levels(1, 16), np.arange(5)), path, image_mode="I;16")
    with path.open("r+b") as file:
        file.seek(int(open_beton(path).pointers[3]) + 7)
        file.write(b"\1\2")
    assert [number for number, _ in verify(path).bad] == [3]


def test_the_image_among_the_fields() -> None:
    """One rgb_image, or else the array `image` of a picture's shape and type; the label is another field."""

    def array(name: str, dtype: str, *shape: int) -> Field:
        return Field(name, "ndarray", np.dtype(dtype), shape)

    label, picture_, other = Field("label", "int"), array("image", "<u2", 4, 5), array("other", "u1", 4, 5)
    assert image_field([other, picture_, label]) is picture_
    assert label_field([picture_, other]) is other
    assert label_field([picture_]) is None
    rgb = Field("x", "rgb_image")
    assert image_field([picture_, rgb]) is rgb  # an array beside a picture is a field like others
    assert label_field([picture_, rgb]) is picture_
    assert image_field([rgb, Field("y", "rgb_image")]) is None
    for bad in (
        array("image", ">u2", 4, 5), array("image", "<i2", 4, 5), array("image", "<f4", 4, 5), array("image", "u1", 4),
        array("image", "u1", 4, 5, 2), array("image", "u1", 4, 5, 3, 1), array("image", "u1", 70_000, 5), other,
    ):  # fmt: skip
        assert image_field([bad, label]) is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(image_folder(tmp_path / "in", {"1.png": WIDE}))
    out = str(tmp_path / "a.beton")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["convert", source, out, "--image-mode", "I;16", "--quiet"])
    np.testing.assert_array_equal(open_beton(out).pixels(0), levels(1, 16)[0])
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["convert", source, out, "--image-mode", "L", "--quiet"])
    assert "1.png: its values have more than 8 bits" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_ffcv_reads_ours_and_we_read_its_files(tmp_path: Path) -> None:
    for mode, kind in MODES.items():
        convert((levels(*kind), np.arange(5)), tmp_path / f"ours-{mode}.beton", image_mode=mode)
        manifest_path(tmp_path / f"ours-{mode}.beton").unlink()
    run_script("loader_stock_arrays.py", tmp_path)
    for mode, kind in MODES.items():
        theirs = np.load(tmp_path / f"ours-{mode}.npz")
        np.testing.assert_array_equal(theirs["images"], levels(*kind))
        np.testing.assert_array_equal(theirs["labels"], np.arange(5))
    for name, (dtype, shape) in KINDS.items():
        beton = open_beton(tmp_path / f"theirs-{name}.beton")
        assert (beton.channels, beton.depth) == ((*shape, 1)[2], 8 * np.dtype(dtype).itemsize)
        np.testing.assert_array_equal(beton.labels, np.arange(COUNT))
        for number in range(COUNT):
            np.testing.assert_array_equal(beton.pixels(number), pixels(name)[number].squeeze())
