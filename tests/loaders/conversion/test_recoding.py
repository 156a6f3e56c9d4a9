"""Lossless recoding of JPEGs in `convert`: the same pixels in every decoder, and damaged files as before."""

import base64
import io
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import call
from drivetrain.common.errors import DataError
from drivetrain.loaders import FFCVLoader, convert, open_beton
from drivetrain.loaders.beton.manifest import manifest_path
from drivetrain.loaders.conversion.encode import Encoding, encode_image
from drivetrain.loaders.native import jpegs
from drivetrain.loaders.native.jpegs import frame_type, recoded
from loader_pictures import image_folder, jpeg_bytes, picture
from PIL import Image

SIDES = (90, 121)  # no multiples of a block, and odd
PICTURE = picture(3, *SIDES)
BASELINE = "recoded losslessly as baseline"
OPTIMIZED = "Huffman tables optimized"
COPIED = "copied unchanged"
SMALLER = Encoding(optimize=True)

PROGRESSIVE_ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hn"
    "Pk1xeXBkeFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2Nj"
    "Y2P/ygARCAAgACgDASIAAhEBAxEB/8wABgAQARD/2gAMAwEAAhADEAAAAfvtBt9JGwS0NIhlrE0RqPfZcqJjGNDCVrrQ/8wABBAF/9oA"
    "CAEBAAEFAhMz/BE0eCtJMZwugf3evr9glgOw5dX/zAAEEQX/2gAIAQMBAT8BHqhyk5e13jU8awDaIUHA/8wABBEF/9oACAECAQE/AXrr"
    "wZWFZJr9h0kI/N29CCj/zAAEEAX/2gAIAQEABj8CsP/MAAQQBf/aAAgBAQABPyGvYGB4fyUwTwFFUCAUGD+/G6D/2gAMAwEAAgADAAAA"
    "EJ7T25Zg/8wABBEF/9oACAEDAQE/EFivtI+c0oRGfP/MAAQRBf/aAAgBAgEBPxABeR8jghq+t6WA/8wABBAF/9oACAEBAAE/EE1XGx7C"
    "f9UxWAWzkz3e6rPSy3K8mwp9IzNvv3OpiYD/2Q=="
)
"""`jpegtran -arithmetic -progressive` of a picture of 40 × 32 pixels, 4:2:0."""

CMYK_ARITHMETIC = base64.b64decode(
    "/9j/2wBDABQODxIPDRQSEBIXFRQYHjIhHhwcHj0sLiQySUBMS0dARkVQWnNiUFVtVkVGZIhlbXd7gYKBTmCNl4x9lnN+gXz/yQAUCAAQ"
    "ABgEQxEATREAWREASxEA/8wABgAQEAX/2gAOBEMATQBZAEsAAD8A+2kLqE97Xymg/rhyynBDGdqb85Wp5QM4dHPu9rt6zpigie9oZlfN"
    "WdOAMbiVn2l7ji1I69rGUjNR51w7IG5eZjAB18x+ry1U7y2hDWvt37L6Bj0UgutV0XpPFcZA/9k="
)
"""CMYK of 24 × 16 pixels with arithmetic codes, and without Adobe's marker, so that it is not inverted."""

MANY_BLOCKS = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABQODxIPDRQSEBIXFRQYHjIhHhwcHj0sLiQySUBMS0dARkVQWnNiUFVtVkVGZIhlbXd7gYKB"
    "TmCNl4x9lnN+gXz/2wBDARUXFx4aHjshITt8U0ZTfHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8"
    "fHz/wgARCAASABQDASIAAiIBAyIB/8QAFwABAQEBAAAAAAAAAAAAAAAABAIFBv/aAAgBAQAAAADnGrp7C6V//8QAGQEAAgMBAAAAAAAA"
    "AAAAAAAAAQMCBAUG/9oACAECEAAAAEgJtyzdPn//xAAXAQEBAQEAAAAAAAAAAAAAAAAEBQYA/9oACAEDEAAAAOpOxz35V1T/xAAdEAAB"
    "BAMBAQAAAAAAAAAAAAAAAQMEIQIxYRES/9oACAEBAAE/AGovBqJwxh1oZi8GYnBI+OKeLsYRKoYRKowRPnR//8QAHBEAAgICAwAAAAAA"
    "AAAAAAAAAAIDEQESEyEx/9oACAECAQE/ANrKs4xGsTFjzQx51fPZERC+H//EABkRAQEBAQEBAAAAAAAAAAAAAAMAAQIhMf/aAAgBAwEB"
    "PwAliW5XyNY1uU3cjjs+X//Z"
)
"""Progressive, 20 × 18 pixels, each of three components sampled 2 × 2: twelve blocks, where a scan may have ten."""

KINDS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "restart markers": {"restart_marker_blocks": 3},
    "quality 5": {"quality": 5},
    "quality 100": {"quality": 100, "subsampling": 0},
    "RGB": {"keep_rgb": True},
}


def by_pillow(jpeg: bytes) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(jpeg)) as image:
        return np.asarray(image)


def by_loader(folder: Path, **options: Any) -> torch.Tensor:
    """Convert a folder, and load it with `FFCVLoader` at its own size."""
    path = folder.parent / f"{len(options)}.beton"
    convert(folder, path, **options)
    settings: dict[str, Any] = {"image_size": 64, "train": False, "dtype": torch.uint8, "workers": 1}
    with FFCVLoader(path, batch_size=len(open_beton(path)), order="sequential", **settings) as loader:
        ((images, _),) = loader
    return images.clone()


def folder_of(tmp_path: Path, *jpegs: bytes) -> Path:
    files = {f"{number:03}.jpg": jpeg for number, jpeg in enumerate(jpegs)}
    return image_folder(tmp_path / "images", files)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_identical(kind: str, progressive: bool) -> None:
    jpeg = jpeg_bytes(PICTURE, progressive=progressive, **KINDS[kind])
    encoded = encode_image(jpeg, SMALLER)
    assert (encoded.width, encoded.height) == SIDES[::-1]
    assert encoded.treatment == (BASELINE if progressive else OPTIMIZED)
    assert frame_type(encoded.payload) == 0xC0
    assert progressive or len(encoded.payload) < len(jpeg)
    np.testing.assert_array_equal(by_pillow(encoded.payload), by_pillow(jpeg))
    assert encode_image(encoded.payload, SMALLER).treatment == COPIED
    assert encode_image(jpeg, Encoding()).treatment == (BASELINE if progressive else COPIED)


def test_pixels_are_identical_in_the_loader(tmp_path: Path) -> None:
    """All kinds, with arithmetic codes, too."""
    jpegs = [jpeg_bytes(PICTURE, progressive=p, **KINDS[k]) for k in KINDS for p in (0, 1)]
    folder = folder_of(tmp_path, *jpegs, PROGRESSIVE_ARITHMETIC)
    assert by_loader(folder, optimize=True, check="decode").equal(by_loader(folder, keep_bytes=True))


@pytest.mark.parametrize("progressive", [False, True])
def test_gray_is_recoded_as_gray(progressive: bool) -> None:
    """`convert` itself stores gray files as RGB."""
    jpeg = jpeg_bytes(Image.fromarray(PICTURE).convert("L"), progressive=progressive)
    result = recoded(jpeg)
    assert result is not None
    np.testing.assert_array_equal(by_pillow(result), by_pillow(jpeg))
    assert encode_image(jpeg, Encoding()).treatment == "converted from L"


@pytest.mark.parametrize("adobe", [True, False])
def test_cmyk_keeps_its_meaning(adobe: bool) -> None:
    """Adobe's marker means inverted. Pillow writes it, and reads small arithmetic files."""
    cmyk = Image.fromarray(PICTURE).convert("CMYK")
    jpeg = jpeg_bytes(cmyk, progressive=True) if adobe else CMYK_ARITHMETIC
    result = recoded(jpeg)
    assert result is not None
    assert (b"Adobe" in result) == adobe
    np.testing.assert_array_equal(by_pillow(result), by_pillow(jpeg))
    assert encode_image(jpeg, Encoding()).treatment == "converted from CMYK"


def test_progressive_arithmetic_codes() -> None:
    assert frame_type(PROGRESSIVE_ARITHMETIC) == 0xCA
    encoded = encode_image(PROGRESSIVE_ARITHMETIC, Encoding())
    assert (encoded.treatment, frame_type(encoded.payload)) == (BASELINE, 0xC0)
    np.testing.assert_array_equal(by_pillow(encoded.payload), by_pillow(PROGRESSIVE_ARITHMETIC))
    kept = encode_image(PROGRESSIVE_ARITHMETIC, Encoding(keep_bytes=True))
    assert (kept.treatment, kept.payload) == (COPIED, PROGRESSIVE_ARITHMETIC)


@pytest.mark.parametrize("progressive", [False, True])
def test_orientation_counts_and_other_exif_data_is_dropped(progressive: bool) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "A maker"
    options = {"exif": exif, "progressive": progressive, "icc_profile": b"profile"}
    turned = encode_image(jpeg_bytes(PICTURE, **options), Encoding())
    assert (turned.treatment, turned.width, turned.height) == ("rotated upright (EXIF)", *SIDES)
    exif[0x0112] = 1
    jpeg = jpeg_bytes(PICTURE, **options)
    upright = encode_image(jpeg, SMALLER)
    assert upright.treatment == (BASELINE if progressive else OPTIMIZED)
    assert not any(text in upright.payload for text in (b"Exif", b"maker", b"profile"))
    np.testing.assert_array_equal(by_pillow(upright.payload), by_pillow(jpeg))


def test_orientation_of_arithmetic_files_counts() -> None:
    """Recoding drops the marker, so it is read before."""
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHIHH", 1, 0x0112, 3, 1, 6, 0) + bytes(4)
    segment = struct.pack(">BBH", 0xFF, 0xE1, len(exif) + 2) + exif
    jpeg = PROGRESSIVE_ARITHMETIC[:2] + segment + PROGRESSIVE_ARITHMETIC[2:]
    encoded = encode_image(jpeg, Encoding())
    assert (encoded.treatment, encoded.width, encoded.height) == ("rotated upright (EXIF)", 32, 40)


def with_sampling(jpeg: bytes, factors: tuple[int, ...]) -> bytes:
    """Overwrite the sampling factors in the frame's header."""
    frame = bytearray(jpeg)
    at = next(at for at in range(2, len(frame)) if frame[at] == 0xFF and frame[at + 1] in (0xC0, 0xC2))
    for component, factor in enumerate(factors):
        frame[at + 11 + 3 * component] = factor
    return bytes(frame)


def test_more_blocks_than_one_scan_may_have() -> None:
    """They get a scan for each component."""
    encoded = encode_image(MANY_BLOCKS, Encoding())
    assert (encoded.treatment, frame_type(encoded.payload)) == (BASELINE, 0xC0)
    assert encoded.payload.count(b"\xff\xda") == 3
    np.testing.assert_array_equal(by_pillow(encoded.payload), by_pillow(MANY_BLOCKS))


def test_sampling_that_cannot_be_decoded_is_refused() -> None:
    """Its coefficients can be read, but libjpeg has no upsampling by 3 : 2."""
    jpeg = with_sampling(jpeg_bytes(np.full((8, 8, 3), 128, np.uint8), subsampling=0), (0x31, 0x21, 0x11))
    with pytest.raises(ValueError, match="sampling factors"):
        recoded(jpeg)
    with pytest.raises(DataError, match="cannot be decoded"):
        encode_image(jpeg, Encoding())


@pytest.mark.parametrize("check", ["decode", "structure"])
def test_what_is_recoded_with_each_check(check: str) -> None:
    plain, progressive = jpeg_bytes(PICTURE), jpeg_bytes(PICTURE, progressive=True)
    assert encode_image(plain, Encoding(check=check)).treatment == COPIED
    assert encode_image(plain, Encoding(check=check, optimize=True)).treatment == OPTIMIZED
    assert encode_image(progressive, Encoding(check=check)).treatment == BASELINE


def test_large_baseline_files_are_not_optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of memory is lowered here; a file at the real one has 44 megapixels."""
    jpeg = jpeg_bytes(PICTURE, subsampling=0)
    coefficients = 2 * 3 * 96 * 128
    monkeypatch.setattr("drivetrain.loaders.conversion.encode._OPTIMIZED_MEMORY", coefficients)
    assert encode_image(jpeg, SMALLER).treatment == OPTIMIZED
    monkeypatch.setattr("drivetrain.loaders.conversion.encode._OPTIMIZED_MEMORY", coefficients - 1)
    assert encode_image(jpeg, SMALLER).treatment == COPIED
    damaged = jpeg[: len(jpeg) // 2] + b"\xff\xd9"
    assert encode_image(damaged, SMALLER).treatment.startswith("re-encoded")


@pytest.mark.parametrize("frame", [0xC0, 0xC2, 0xC9])
def test_a_decompression_bomb_takes_no_memory(frame: int) -> None:
    jpeg = jpeg_bytes(PICTURE, progressive=frame == 0xC2)
    at = next(at for at in range(2, len(jpeg)) if jpeg[at] == 0xFF and jpeg[at + 1] in (0xC0, 0xC2))
    huge = jpeg[: at + 1] + bytes([frame]) + jpeg[at + 2 : at + 5]
    huge += struct.pack(">HH", 65_000, 65_000) + jpeg[at + 9 :]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="take more memory"):
        recoded(huge)
    with pytest.raises(DataError, match="decompression bomb"):
        encode_image(huge, Encoding())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_too_many_scans_are_refused() -> None:
    """Each would take a pass over the picture. Here, a component's scan is repeated, without a warning."""
    jpeg = recoded(MANY_BLOCKS)
    assert jpeg is not None
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    assert recoded(jpeg[:-2] + last * 400 + jpeg[-2:]) == jpeg
    with pytest.raises(ValueError, match="500 scans"):
        recoded(jpeg[:-2] + last * 600 + jpeg[-2:])


def test_size_limit_of_the_result() -> None:
    jpeg = jpeg_bytes(PICTURE, progressive=True)
    result = recoded(jpeg)
    assert result is not None
    assert recoded(jpeg, len(result)) == result
    assert recoded(jpeg, len(result) - 1) is None
    assert recoded(jpeg, 0) is None


def test_report_and_keep_bytes(tmp_path: Path) -> None:
    jpegs = [jpeg_bytes(PICTURE, **options) for options in ({"optimize": True}, {}, {"progressive": True})]
    folder = folder_of(tmp_path, *jpegs, PROGRESSIVE_ARITHMETIC)
    report = convert(folder, tmp_path / "a.beton", optimize=True)
    assert report.treatments == {BASELINE: 2, OPTIMIZED: 1, COPIED: 1}
    assert f"2 {BASELINE}, " in str(report)
    end = call("convert", str(folder), str(tmp_path / "b.beton"), "--keep-bytes", "--quiet")
    assert "4 images (all copied unchanged)" in end.out
    beton = open_beton(tmp_path / "b.beton")
    assert [beton.stored(number) for number in range(4)] == [*jpegs, PROGRESSIVE_ARITHMETIC]
    assert beton.manifest["settings"]["keep_bytes"] is True
    for number in range(4):
        np.testing.assert_array_equal(beton.image(number), open_beton(tmp_path / "a.beton").image(number))
    with pytest.raises(DataError, match="keep_bytes='yes'"):
        convert(folder, tmp_path / "c.beton", keep_bytes="yes")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="Pass only one"):
        convert(folder, tmp_path / "c.beton", keep_bytes=True, optimize=True)


def test_same_file_for_any_number_of_workers(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{"optimize": True}, {"progressive": True}, {}]
    jpegs = [jpeg_bytes(picture(seed, 60 + seed, 80), **kinds[seed % 3]) for seed in range(24)]
    folder, results = folder_of(tmp_path, *jpegs), []
    for workers in (1, 2, 5):
        out = tmp_path / f"{workers}.beton"
        convert(folder, out, workers=workers, optimize=True)
        results.append((out.read_bytes(), manifest_path(out).read_bytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("arithmetic", [False, True])
def test_damaged_progressive_files(arithmetic: bool) -> None:
    """Cut, flipped and overwritten: each is refused, repaired or intact as for the loader's decoder."""
    rng = np.random.default_rng(11)
    sound = PROGRESSIVE_ARITHMETIC if arithmetic else jpeg_bytes(PICTURE, progressive=True)
    with Image.open(io.BytesIO(sound)) as image:
        size = image.size
    refused = 0
    for number in range(300):
        data = bytearray(sound)
        at = int(rng.integers(2, len(data)))
        if number % 3 == 0:
            del data[at:]
        elif number % 3 == 1:
            data[at] ^= 1 << int(rng.integers(8))
        else:
            data[at : at + 4] = rng.bytes(4)
        try:
            encoded = encode_image(bytes(data), Encoding())
        except DataError:
            refused += 1
            continue
        assert jpegs.decodes(encoded.payload, encoded.width, encoded.height)
        if encoded.treatment == BASELINE and (encoded.width, encoded.height) == size:
            assert jpegs.decodes(bytes(data), *size)
    assert refused > 100


def test_readers_recode_only_arithmetic_codes() -> None:
    progressive = jpeg_bytes(PICTURE, progressive=True)
    assert jpegs.huffman_coded(progressive) is progressive
    assert frame_type(jpegs.huffman_coded(PROGRESSIVE_ARITHMETIC)) == 0xC0


def without_scans(jpeg: bytes, kept: int) -> bytes:
    """A progressive JPEG's first scans, and its end."""
    at, scans = 2, 0
    while jpeg[at + 1] != 0xD9:
        if jpeg[at + 1] == 0xDA:
            scans += 1
            if scans > kept:
                break
            at += 2
            while jpeg[at] != 0xFF or jpeg[at + 1] in (0x00, *range(0xD0, 0xD8)):
                at += 1
        else:
            at += 2 + int.from_bytes(jpeg[at + 2 : at + 4])
    return jpeg[:at] + b"\xff\xd9"


@pytest.mark.parametrize("check", ["decode", "structure"])
def test_a_progressive_file_without_all_scans_keeps_its_pixels(check: str) -> None:
    """Decoders smooth what its scans leave open; as baseline it would have other pixels."""
    whole = jpeg_bytes(PICTURE, progressive=True)
    scans = sum(without_scans(whole, kept) != whole for kept in range(1, 20)) + 1
    assert scans > 5
    changed = 0
    for kept in range(1, scans + 1):
        file = without_scans(whole, kept)
        encoded = encode_image(file, Encoding(check=check))  # type: ignore[arg-type]
        assert np.array_equal(by_pillow(encoded.payload), by_pillow(file)), kept
        changed += encoded.treatment == BASELINE
        assert encoded.treatment in (BASELINE, COPIED)
    assert 1 <= changed < scans
