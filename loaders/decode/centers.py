"""What of each image evaluation takes, and where in the output it goes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def central_crops(
    heights: NDArray[np.int64], widths: NDArray[np.int64], size: tuple[int, int], ratio: float
) -> NDArray[np.int64]:
    """Return central crops `(n, 4)`: top, left, height and width, in whole pixels, rounded down, as FFCV's.

    Args:
        heights, widths: of the images, `(n,)`.
        size: height and width of the output, whose shape the crops have.
        ratio: their size relative to the largest such crop; a square's side relative to the image's shorter one.
    """
    height, width = size
    tall = heights * width <= widths * height  # the image's height limits them
    largest = (
        np.where(tall, heights, widths * height / width),
        np.where(tall, heights * width / height, widths),
    )
    h, w = (np.maximum(np.floor(sides * ratio).astype(np.int64), 1) for sides in largest)
    return np.stack([(heights - h) // 2, (widths - w) // 2, h, w], axis=1)


def fitted(heights: NDArray[np.int64], widths: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.int64]:
    """Return where full images go that are scaled to fit into the output, `(n, 4)`: top, left, height and width.

    They keep their aspect ratio, to the nearest pixel (halves to even, as Python's `round`), and are centred.

    Args:
        heights, widths: of the images, `(n,)`.
        size: height and width of the output.
    """
    height, width = size
    tall = height * widths <= width * heights  # the output's height limits them
    h = np.where(tall, height, _divided(heights * width, widths))
    w = np.where(tall, _divided(widths * height, heights), width)
    return np.stack([(height - h) // 2, (width - w) // 2, h, w], axis=1)


def _divided(numbers: NDArray[np.int64], divisors: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rounded quotients, at least 1: exact, in integers."""
    whole, rest = numbers // divisors, numbers % divisors
    up = (2 * rest > divisors) | ((2 * rest == divisors) & (whole % 2 == 1))
    rounded: NDArray[np.int64] = np.maximum(whole + up, 1)
    return rounded
