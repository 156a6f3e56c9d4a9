"""Unusual JPEG files: damaged EXIF data, arithmetic coding, several pictures in one file; and `jpegs.decodes`, which
decodes at an eighth of the size, rejects the same files as the loader's full decode."""

import base64
import io
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from drivetrain.loaders import FFCVLoader, TorchLoader, open_beton, verify
from drivetrain.loaders.beton.layout import MODE_JPEG, Field
from drivetrain.loaders.conversion.encode import Encoded, Encoding, encode_image
from drivetrain.loaders.conversion.writer import Sample, write_betons
from drivetrain.loaders.native import jpegs
from drivetrain.loaders.native.jpegs import decodes
from ffcv_library import library
from loader_pictures import file_bytes, jpeg_bytes, picture
from PIL import Image

PICTURE = picture(3, 48, 64)
UPRIGHT = "copied unchanged"
TURNED = "rotated upright (EXIF)"

ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxO"
    "UlNSMj5aYVpQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09P"
    "T09PT09PT0//yQARCAAwAEADASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD+zakwmXCXm4h93PM/fJyefwT8q/OU"
    "N6xpT80zABbo4LQd1kVL87ZSWcwL9nV4Ug6R6ooBMCVt6LbIOKVTqHZFWZ78nlKVZYdCH8gjQnXkVQUN+hLoT4lrfgeafDifz9iS"
    "hz/bHSoueustghubSxZeUeOGZQ64vS29UmoWtN3Uh76JtUk/raOVjkf22wpQ3155mt+oZ9bW8mMacB+fjm3y3oFpz+NmKEnGlnfe"
    "HeXzvPZTEO7zVYOT2Z7ZfKwza6LjEM8I9DM3afg9SRF1M4VgD/jmXiiCYeNL3oUhw4o06fr92giKrNr+HeRVGh28i06a8hU6+Nay"
    "DoGkk+I2qfJvpHKwrxJqntk1q5Hdig2P7AjNw8gWWddGFQYRqL5Mvui7Unk1A5K5Tdws8yoVQC9WeYX3Iaf/AO0ACZjU5aIsbqFu"
    "3BNrC+Pp5oPwFeJKbYJgvAYTV5hj4eq+AfD/2Q=="
)
"""`jpegtran -arithmetic` of `jpeg_bytes(PICTURE, quality=60)`."""


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def with_segment(jpeg: bytes, marker: int, content: bytes) -> bytes:
    return jpeg[:2] + segment(marker, content) + jpeg[2:]


def orientation(value: bytes, kind: int = 3, count: int = 1) -> bytes:
    """EXIF data with this one tag."""
    tag = struct.pack("<HHHI", 1, 0x0112, kind, count) + value.ljust(4, b"\0")
    return b"Exif\0\0II*\0\x08\0\0\0" + tag + bytes(4)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0garbage in place of a TIFF header",
        b"Exif\0\0",
        b"Exif\0\0II",
        orientation(b"\6")[:12],
        orientation(b"\0"),
        orientation(b"\x09"),
        orientation(b"6\0", kind=2, count=2),
        orientation(b"x\0", kind=2, count=2),
        orientation(b"\6", kind=99),
    ],
    ids=["no TIFF", "empty", "cut in the header", "cut", "0", "9", "'6'", "'x'", "unknown type"],
)
def test_exif_data_that_means_nothing_leaves_the_picture_as_it_is(exif: bytes) -> None:
    """The density in the JFIF header keeps Pillow from reading the EXIF data when it opens the file."""
    jpeg = with_segment(jpeg_bytes(PICTURE, dpi=(72, 72)), 0xE1, exif)
    assert encode_image(jpeg, Encoding(optimize=True)).treatment == "Huffman tables optimized"
    kept = encode_image(jpeg, Encoding())
    assert (kept.treatment, kept.payload) == (UPRIGHT, jpeg)
    small = encode_image(jpeg, Encoding(max_resolution=32))
    assert (small.treatment, small.width, small.height) == ("scaled down", 32, 24)
    assert encode_image(Image.open(io.BytesIO(jpeg)), Encoding()).treatment == "stored"
    png = encode_image(file_bytes(PICTURE, "PNG", exif=exif), Encoding())
    assert (png.treatment, png.payload) == ("stored", PICTURE.tobytes())


def test_huge_exif_data_is_read() -> None:
    """It fills a segment, and continues in the next."""
    jpeg = with_segment(jpeg_bytes(PICTURE), 0xE1, b"Exif\0\0" + bytes(65_000))
    jpeg = with_segment(jpeg, 0xE1, orientation(b"\6") + bytes(65_000))
    encoded = encode_image(jpeg, Encoding())
    assert (encoded.treatment, encoded.width, encoded.height) == (TURNED, 48, 64)


def long_arithmetic() -> bytes:
    """Of more than 64 KiB, the first part that Pillow reads, which ends within the coded picture."""
    middle = (ARITHMETIC.index(b"\xff\xda") + len(ARITHMETIC)) // 2
    jpeg = with_segment(ARITHMETIC, 0xFE, bytes((1 << 16) - middle - 4))
    assert jpeg.index(b"\xff\xda") < 1 << 16 < len(jpeg)
    return jpeg


@pytest.mark.parametrize("check", ["decode", "structure"])
@pytest.mark.parametrize("jpeg", [ARITHMETIC, long_arithmetic()], ids=["short", "long"])
def test_arithmetic_codes_become_huffman_codes_without_loss(jpeg: bytes, check: str) -> None:
    encoded = encode_image(jpeg, Encoding(check=check))
    assert encoded.treatment == "recoded losslessly as baseline"
    assert (encoded.mode, encoded.width, encoded.height) == (MODE_JPEG, 64, 48)
    assert jpegs.frame_type(jpeg) == 0xC9
    assert jpegs.frame_type(encoded.payload) in jpegs.SEQUENTIAL_FRAMES
    assert jpegs.decodes(encoded.payload, 64, 48)
    original = Image.open(io.BytesIO(jpeg_bytes(PICTURE, quality=60))).convert("RGB")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encoded.payload)).convert("RGB")), original)
    raw = encode_image(jpeg, Encoding(write_mode="raw"))
    assert raw.payload == original.tobytes()


@pytest.mark.parametrize("at", [-100, -300, 400])
def test_damaged_arithmetic_codes_are_one_error(at: int) -> None:
    with pytest.raises(ValueError, match=r"cannot be decoded: (Premature end|Corrupt JPEG)"):
        encode_image(ARITHMETIC[:at], Encoding())


def test_arithmetic_codes_of_a_huge_picture_are_refused_by_the_header() -> None:
    """Its coefficients would take 24 GB."""
    at = ARITHMETIC.index(b"\xff\xc9") + 5
    huge = ARITHMETIC[:at] + struct.pack(">HH", 65_000, 65_000) + ARITHMETIC[at + 4 :]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="decompression bomb"):
        encode_image(huge, Encoding())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_a_file_with_arithmetic_codes_is_read_by_both_loaders(tmp_path: Path) -> None:
    """Others may write such files; `verify` finds them sound, and so they are."""
    path, fields = tmp_path / "a.beton", [Field("image", "rgb_image"), Field("label", "int")]
    images = [long_arithmetic(), jpeg_bytes(PICTURE, quality=60)]
    samples = [Sample(Encoded(MODE_JPEG, 64, 48, image, "", (64, 48)), (0,)) for image in images]
    write_betons([path], samples, len(samples), fields, {"classes": []})
    assert verify(path).sound
    assert open_beton(path).image(0).tobytes() == open_beton(path).image(1).tobytes()
    options = {"batch_size": 2, "image_size": 32, "train": False, "workers": 1}
    with FFCVLoader(path, **options) as ours, TorchLoader(path, **options | {"workers": 0}) as theirs:
        for (one, other), _ in (*ours, *theirs):
            assert one.equal(other)


def test_a_folder_with_arithmetic_codes_is_read(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    for name, image in (("a", long_arithmetic()), ("b", jpeg_bytes(PICTURE, quality=60))):
        (tmp_path / "class" / f"{name}.jpg").write_bytes(image)
    with TorchLoader(tmp_path, batch_size=2, image_size=32, train=False, workers=0) as loader:
        (((one, other), _),) = loader
    assert one.equal(other)


def test_pictures_after_the_first_are_left_alone() -> None:
    """As cameras and telephones add them (MPO)."""
    second = Image.fromarray(PICTURE[:24, :24])
    both = file_bytes(PICTURE, "MPO", save_all=True, append_images=[second])
    encoded = encode_image(both, Encoding())
    assert (encoded.treatment, encoded.width, encoded.height) == (UPRIGHT, 64, 48)
    assert encoded.payload == both
    recoded = encode_image(both, Encoding(optimize=True))
    assert (recoded.treatment, recoded.width, recoded.height) == ("Huffman tables optimized", 64, 48)
    with Image.open(io.BytesIO(both)) as first, Image.open(io.BytesIO(recoded.payload)) as only:
        assert (only.format, only.tobytes()) == ("JPEG", first.tobytes())


def test_frames_that_the_decoder_does_not_know_are_not_passed_through() -> None:
    """The check of the structure alone, which decodes nothing, sees by the header that they are lossless JPEGs."""
    jpeg = jpeg_bytes(PICTURE).replace(b"\xff\xc0", b"\xff\xc3", 1)
    with pytest.raises(ValueError, match="cannot be decoded"):
        encode_image(jpeg, Encoding(check="structure"))


@pytest.mark.parametrize(
    ("jpeg", "frame"),
    [
        (jpeg_bytes(PICTURE), 0xC0),
        (jpeg_bytes(PICTURE, progressive=True), 0xC2),
        (with_segment(jpeg_bytes(PICTURE), 0xE1, b"\xff\xc9" * 10), 0xC0),
        (b"\xff\xd8\xff\xff\xff\x01\xff\xc1\0\x02", 0xC1),
        (jpeg_bytes(PICTURE)[:12], None),
        (b"\xff\xd8\xff\xe1\0\0" * 3, None),
        (b"", None),
    ],
    ids=["baseline", "progressive", "markers in a segment", "fill bytes", "cut", "no length", "empty"],
)
def test_frame_type(jpeg: bytes, frame: int | None) -> None:
    assert jpegs.frame_type(jpeg) == frame


MUTANTS = 100
SIDES = (90, 130)


def decodes_in_full(jpeg: bytes, width: int, height: int) -> bool:
    """As FFCV's own library does."""
    source, target = np.frombuffer(jpeg, np.uint8), np.empty(width * height * 3, np.uint8)
    status = library().imdecode(
        source.ctypes.data, len(jpeg), height, width, target.ctypes.data,
        height, width, 0, 0, 1, 1, False, False,
    )  # fmt: skip
    return bool(status == 0)


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}, {"quality": 30}],
    ids=str,
)
def test_refuses_the_same_damaged_files(options: dict[str, object]) -> None:
    """Cut, flipped, overwritten and with stretches left out: 500 mutants in all."""
    rng, sound = np.random.default_rng(5), jpeg_bytes(picture(4, *SIDES), **options)
    refused = 0
    for number in range(MUTANTS):
        data = bytearray(sound)
        at = int(rng.integers(2, len(data)))
        if number % 4 == 0:
            del data[at:]
        elif number % 4 == 1:
            data[at] ^= 1 << int(rng.integers(8))
        elif number % 4 == 2:
            data[at : at + 8] = rng.bytes(8)
        else:
            del data[at : at + int(rng.integers(1, 40))]
        full = decodes_in_full(bytes(data), SIDES[1], SIDES[0])
        assert decodes(bytes(data), SIDES[1], SIDES[0]) == full, (number, at)
        refused += not full
    assert 20 < refused < MUTANTS  # both happen, so that the comparison is worth something
    assert decodes(sound, SIDES[1], SIDES[0])
