"""`dt_area` gives the pixels of OpenCV's area resize, as FFCV's library calls it, in every bit."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from drivetrain.loaders.native.library import library
from ffcv_library import library as ffcv_library
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]
OK, WRONG_SIZE, NO_MEMORY = 0, 2, 4
GUARD = 171


def by_ffcv(image: Pixels, box: Box, height: int, width: int) -> Pixels:
    top, left, h, w = box
    target = np.zeros((height, width, 3), np.uint8)
    resize = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(("resize", ffcv_library()))
    resize(
        0, image.ctypes.data, *image.shape[:2], top, top + h, left, left + w, target.ctypes.data, height, width
    )  # fmt: skip
    return target


def by_us(image: Pixels, box: Box, height: int, width: int) -> Pixels:
    """Also check that nothing is written outside the target and the working memory."""
    top, left, h, w = box
    target = np.full(height * width * 3 + 64, GUARD, np.uint8)
    size = library().dt_area_bytes(h, w, height, width)
    memory = np.full(size + 128, 255, np.uint8)  # floats of this pattern are NaN
    start = -memory.ctypes.data % 64
    source = image.ctypes.data + (top * image.shape[1] + left) * 3
    arguments = (source, image.shape[1] * 3, h, w, None, target.ctypes.data, height, width)
    assert library().dt_area(*arguments, memory.ctypes.data + start, size) == OK
    assert (target[height * width * 3 :] == GUARD).all()
    assert (memory[:start] == 255).all()
    assert (memory[start + size :] == 255).all()
    return target[: height * width * 3].reshape(height, width, 3)


def picture(rng: np.random.Generator, height: int, width: int, extreme: bool = False) -> Pixels:
    """Return noise; `extreme` has only 0 and 255, which reaches the sums' limits and many ties."""
    return (
        rng.integers(0, 2, (height, width, 3), np.uint8) * np.uint8(255)
        if extreme
        else rng.integers(0, 256, (height, width, 3), np.uint8)
    )


Sizes = Callable[[np.random.Generator], tuple[int, int, int, int]]


def any_sizes(rng: np.random.Generator) -> tuple[int, int, int, int]:
    h, w, height, width = rng.integers(1, 120, 4)
    return h, w, height, width


def whole_ratios(rng: np.random.Generator) -> tuple[int, int, int, int]:
    height, width = rng.integers(1, 50, 2)
    return height * rng.integers(1, 7), width * rng.integers(1, 7), height, width


def halves(rng: np.random.Generator) -> tuple[int, int, int, int]:
    height, width = rng.integers(1, 80, 2)
    return 2 * height, 2 * width, height, width


def smaller(rng: np.random.Generator) -> tuple[int, int, int, int]:
    height, width = rng.integers(1, 80, 2)
    return height + rng.integers(0, 300), width + rng.integers(0, 300), height, width


def larger(rng: np.random.Generator) -> tuple[int, int, int, int]:
    h, w = rng.integers(1, 60, 2)
    return h, w, h + rng.integers(0, 200), w + rng.integers(0, 200)


def mixed(rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Larger in one direction, smaller in the other."""
    h, width = rng.integers(1, 60, 2)
    return h, width + rng.integers(0, 100), h + rng.integers(0, 100), width


def single(rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A side of one pixel, in the source, the target or both."""
    sides = rng.integers(1, 100, 4)
    sides[rng.integers(4)] = 1
    sides[rng.integers(4)] = 1
    h, w, height, width = sides
    return h, w, height, width


def to_usual(rng: np.random.Generator) -> tuple[int, int, int, int]:
    h, w = rng.integers(90, 700, 2)
    side = (96, 128, 160, 176, 224, 256)[rng.integers(6)]
    return h, w, side, side


@pytest.mark.parametrize(
    "sizes", [any_sizes, whole_ratios, halves, smaller, larger, mixed, single, to_usual],
    ids=lambda sizes: sizes.__name__,
)  # fmt: skip
def test_equals_ffcv(sizes: Sizes) -> None:
    rng = np.random.default_rng(7)
    for case in range(150):
        h, w, height, width = (int(side) for side in sizes(rng))
        image = picture(rng, h + int(rng.integers(8)), w + int(rng.integers(8)), case % 3 == 0)
        top, left = int(rng.integers(image.shape[0] - h + 1)), int(rng.integers(image.shape[1] - w + 1))
        expected = by_ffcv(image, (top, left, h, w), height, width)
        np.testing.assert_array_equal(
            by_us(image, (top, left, h, w), height, width), expected, f"{h} × {w} to {height} × {width}"
        )


@pytest.mark.parametrize(
    ("h", "w", "height", "width"),
    [(1, 1, 1, 1), (1, 1, 7, 5), (65535, 1, 3, 1), (1, 65535, 1, 65534), (3, 1, 65535, 2), (300, 300, 1, 1),
     (672, 672, 224, 224), (1792, 896, 256, 128), (600, 900, 200, 450), (5, 7, 5, 7)],
)  # fmt: skip
def test_limits(h: int, w: int, height: int, width: int) -> None:
    image = picture(np.random.default_rng(1), h, w)
    box = (0, 0, h, w)
    np.testing.assert_array_equal(by_us(image, box, height, width), by_ffcv(image, box, height, width))


def test_white_stays_white() -> None:
    """Also where the sum of a box exceeds 32 bits, which OpenCV's does not."""
    image = np.full((4200, 4100, 3), 255, np.uint8)
    for height, width in ((1, 1), (224, 224), (300, 5000)):
        assert (by_us(image, (0, 0, 4200, 4100), height, width) == 255).all()


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("side", [0, -1, 65536, 2**62])
def test_rejects_a_side(place: int, side: int) -> None:
    sides = [8, 8, 4, 4]
    sides[place] = side
    h, w, height, width = sides
    assert library().dt_area_bytes(h, w, height, width) == 0
    assert library().dt_area(None, 24, h, w, None, None, height, width, None, 2**40) == WRONG_SIZE


def test_rejects_too_little_memory() -> None:
    size = library().dt_area_bytes(8, 8, 5, 5)
    assert library().dt_area(None, 24, 8, 8, None, None, 5, 5, None, size - 1) == NO_MEMORY
