"""Masks, boxes and keypoints as stored: PNG files and numbers of any program, and what is rejected."""

import io
import zlib
from typing import Any

import numpy as np
import pytest
from drivetrain.loaders.beton.targets import coordinates, decode_mask, encode_mask, palette
from loader_pictures import PNG, file_bytes, png_chunk, png_of
from numpy.typing import NDArray
from PIL import Image

HEIGHT, WIDTH = 37, 53


def indices(largest: int = 20, seed: int = 0) -> NDArray[np.int64]:
    """A mask of rectangles."""
    rng, mask = np.random.default_rng(seed), np.zeros((HEIGHT, WIDTH), dtype=np.int64)
    for index in (*rng.integers(0, largest, 4), largest):
        top, left = rng.integers(0, HEIGHT - 9), rng.integers(0, WIDTH - 9)
        mask[top : top + rng.integers(3, 30), left : left + rng.integers(3, 30)] = index
    return mask


@pytest.mark.parametrize(
    ("largest", "mode", "dtype"),
    [(1, "P", "u1"), (255, "P", "u1"), (256, "I;16", "u2"), (65535, "I;16", "u2")],
)
def test_masks_are_png_files_that_pillow_opens(largest: int, mode: str, dtype: str) -> None:
    mask = indices(largest)
    stored = encode_mask(mask)
    with Image.open(io.BytesIO(stored)) as image:
        assert (image.mode, image.size) == (mode, (WIDTH, HEIGHT))
        assert np.array_equal(np.asarray(image), mask)
        if mode == "P":
            assert np.array_equal(np.asarray(image.convert("RGB")), palette()[mask])
    decoded = decode_mask(stored, HEIGHT, WIDTH)
    assert decoded.dtype == np.dtype(dtype)
    assert np.array_equal(decoded, mask)


def test_colors_are_those_of_pascal_voc() -> None:
    colors = palette()
    assert colors[[0, 1, 2, 7, 8, 15, 20]].tolist() == [
        [0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 128], [64, 0, 0], [192, 128, 128], [0, 64, 128],
    ]  # fmt: skip
    assert colors[255].tolist() == [224, 224, 192]
    assert len(np.unique(colors, axis=0)) == 256


def test_masks_of_other_programs() -> None:
    mask = indices(3).astype(np.uint8)
    few = Image.fromarray(mask)
    few.putpalette([0, 0, 0, 9, 9, 9, 200, 0, 0, 0, 99, 7])
    for stored, expected in (
        (file_bytes(Image.fromarray(mask), "PNG"), mask),
        (file_bytes(Image.fromarray(mask > 1), "PNG"), mask > 1),
        (file_bytes(few, "PNG", bits=2), mask),
        (file_bytes(few, "PNG", bits=4), mask),
        (file_bytes(few, "PNG", bits=8, transparency=0, optimize=True), mask),
        (file_bytes(Image.fromarray(mask.astype(np.uint16) * 999), "PNG"), mask.astype(int) * 999),
    ):
        decoded = decode_mask(stored, HEIGHT, WIDTH)
        assert decoded.dtype in (np.uint8, np.uint16)
        assert np.array_equal(decoded, expected)
    packed = np.packbits(mask > 1, axis=1)
    rows = np.concatenate([np.zeros((HEIGHT, 1), np.uint8), packed], axis=1).tobytes()
    assert np.array_equal(decode_mask(png_of(1, 0, WIDTH, HEIGHT, rows), HEIGHT, WIDTH), mask > 1)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (np.full((3, 4), -1), "has the class index -1; expected 0 to 65535"),
        (np.full((3, 4), 65536), "has the class index 65536"),
        (np.zeros((3, 4), np.float32), r"is float32 of shape \(3, 4\); expected integers"),
        (np.zeros((3, 4, 3), np.uint8), r"shape \(3, 4, 3\)"),
        (np.zeros((0, 4), np.uint8), r"shape \(0, 4\)"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_not_a_mask(mask: NDArray[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        encode_mask(mask)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (b"", "not a PNG file"),
        (file_bytes(indices().astype(np.uint8), "PNG")[:-1], "truncated"),
        (file_bytes(indices().astype(np.uint8), "PNG")[:20], "truncated"),
        (file_bytes(Image.new("RGB", (WIDTH, HEIGHT)), "PNG"), "RGB with 8 bits; expected class indices"),
        (file_bytes(Image.new("RGBA", (WIDTH, HEIGHT)), "PNG"), "RGB with transparency"),
        (file_bytes(Image.new("LA", (WIDTH, HEIGHT)), "PNG"), "gray with transparency"),
        (file_bytes(Image.new("L", (HEIGHT, WIDTH)), "PNG"), "37 × 53 pixels .* its image has 53 × 37"),
        (png_of(4, 0, WIDTH, HEIGHT, b""), "gray with 4 bits"),  # Pillow would give 17 times the indices
        (png_of(8, 0, WIDTH, HEIGHT, b"\0" * 99), "ends after 1 of 37 rows"),
        (png_of(8, 0, WIDTH, HEIGHT, b"\0" * 3000).replace(b"IHDR", b"IEND"), "damaged: the CRC-32 of"),
        (PNG + png_chunk(b"IEND", b""), "does not begin with its only header"),
        (png_of(8, 0, 50000, 50000, b"\0" * 99), "50000 × 50000 pixels"),
    ],
    ids=str,
)
def test_other_files_are_rejected(stored: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode_mask(stored, HEIGHT, WIDTH)


def test_every_changed_byte_is_noticed() -> None:
    """The CRC-32 of each chunk finds all of them; Pillow alone does not check that of the pixels."""
    stored = encode_mask(indices())
    for at in range(len(stored)):
        changed = bytearray(stored)
        changed[at] ^= 1 << at % 8
        with pytest.raises(ValueError, match=r"."):
            decode_mask(bytes(changed), HEIGHT, WIDTH)


@pytest.mark.parametrize("nothing", [[], np.zeros((0, 4)), np.zeros((0, 4), np.int64)], ids=str)
def test_no_boxes(nothing: Any) -> None:
    assert coordinates("boxes", nothing).shape == (0, 4)


def test_boxes_and_keypoints() -> None:
    assert coordinates("boxes", [[1, 2.5, 3, 2.5]]).tolist() == [[1, 2.5, 3, 2.5]]
    assert coordinates("keypoints", [[1, -2], [3, 4]]).tolist() == [[1, -2], [3, 4]]


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("boxes", [[1, 2, 3, 4], [1, 2, 3]], "each a list of 4 numbers: left, top, right, bottom"),
        ("boxes", [1, 2, 3, 4], "expected any number of boxes"),
        ("boxes", [["1", "2", "3", "4"]], "expected any number of boxes"),
        ("boxes", None, "expected any number of boxes"),
        ("boxes", {"a": 1}, "expected any number of boxes"),
        ("boxes", [[True, True, True, True]], "expected any number of boxes"),
        ("boxes", [[0, 0, 1, 1], [0, 0, float("nan"), 1]], r"number 1 of its boxes .* not finite"),
        ("boxes", [[0, 0, 1, 1], [5, 0, 4, 1]], r"box 1 is \[5, 0, 4, 1\], which ends before it begins"),
        ("keypoints", [[1, 2, 1]], "each a list of 2 numbers: x, y"),
        ("keypoints", [[1, float("inf")]], "number 0 of its keypoints"),
    ],
    ids=str,
)
def test_what_are_not_boxes(kind: str, values: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        coordinates(kind, values)


@pytest.mark.parametrize("shape", [(1, 1), (7, 30), (64, 65), (300, 2)])
def test_lines_with_and_without_filters_are_read_alike(shape: tuple[int, int]) -> None:
    """Pillow filters gray lines, and not those with a palette; only the latter are read without it."""
    indices = (np.add.outer(np.arange(shape[0]) * 3, np.arange(shape[1])) % 256).astype(np.uint8)
    for stored in (encode_mask(indices), file_bytes(indices, "PNG")):
        assert np.array_equal(decode_mask(stored, *shape), indices)
        for rows in {1, shape[0] // 2 + 1, shape[0]}:
            assert np.array_equal(decode_mask(stored, *shape, rows)[:rows], indices[:rows])


def test_lines_in_several_chunks_too_few_and_damaged() -> None:
    rows = bytes([0, 1, 2, 3, 0, 4, 5, 6])
    whole, lines = png_of(8, 0, 3, 2, rows), zlib.compress(rows)

    def file(*parts: bytes) -> bytes:
        return whole.replace(png_chunk(b"IDAT", lines), b"".join(png_chunk(b"IDAT", part) for part in parts))

    assert decode_mask(file(lines[:5], lines[5:]), 2, 3).tolist() == [[1, 2, 3], [4, 5, 6]]
    for wrong in (lines[:9], b"", b"no zlib", zlib.compress(bytes(4))):
        with pytest.raises(ValueError, match=r"its PNG (cannot be decoded|ends after 1 of 2 rows)"):
            decode_mask(file(wrong), 2, 3)
