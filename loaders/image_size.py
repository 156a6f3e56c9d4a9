"""The size of a loader's images: one side, or height and width. torch is not imported."""

from typing import Any

from ..common.checks import is_whole

ImageSize = int | tuple[int, int]
"""Side of square images, or height and width; in pixels."""


def height_width(image_size: ImageSize) -> tuple[int, int]:
    return image_size if isinstance(image_size, tuple) else (image_size, image_size)


def size_text(image_size: ImageSize) -> str:
    return "{} × {}".format(*height_width(image_size))


def usual_size(image_size: Any) -> Any:
    """Return a list as a tuple, and equal sides as one; anything else, also what is not a size, unchanged."""
    if isinstance(image_size, list):
        image_size = tuple(image_size)
    square = isinstance(image_size, tuple) and len(image_size) == 2 and image_size[0] == image_size[1]
    return image_size[0] if square else image_size


def is_size(image_size: Any) -> bool:
    sides = image_size if isinstance(image_size, tuple) and len(image_size) == 2 else (image_size,)
    return all(is_whole(side, 1) for side in sides)
