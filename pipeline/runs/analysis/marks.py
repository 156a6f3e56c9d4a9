"""Boxes and keypoints on the pictures of a batch: which there are, and how they are drawn."""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ....loaders.decode.moving import moving_fields
from ....loaders.epochs import EpochLoader

SIDE = 192  # pixels that a picture's shorter side has at least, so that lines are thinner than what they show


@dataclass(frozen=True)
class Mark:
    """A box or a keypoint on a picture.

    Attributes:
        name: of its class; of its field, if the batch has no classes for it.
        number: of its class, or of its field, which gives its color.
        place: left, top, right and bottom of a box, or x and y of a keypoint, in pixels of the picture. Edges of a box
            are between pixels; a keypoint at a whole number is in the middle of a pixel.

    Example::

        >>> Mark("cat", 0, (4.0, 2.5, 20.0, 30.0)).name
        'cat'
    """

    name: str
    number: int
    place: tuple[float, ...]


def marks_of(loader: EpochLoader, values: Mapping[str, Any], count: int) -> tuple[tuple[Mark, ...], ...]:
    """Return the boxes and keypoints in the first `count` pictures of a batch with these further fields; () if none is
    of boxes or keypoints. Boxes outside of the crop, which have no area, and keypoints outside of the picture are left
    out."""
    kinds = _kinds(loader)
    names = [name for name in values if kinds.get(name) in ("boxes", "keypoints")]
    others = [each for name, each in values.items() if name not in kinds]
    found: list[list[Mark]] = [[] for _ in range(count if names else 0)]
    for number, name in enumerate(names):
        classes = _classes_of(values[name], others)
        for sample, own in enumerate(found):
            for at, place in enumerate(values[name][sample].tolist()):
                if _is_visible(place, *loader.settings.size):
                    known = (name, number) if classes is None else _named(classes[sample][at], loader.classes)
                    own.append(Mark(*known, tuple(place)))
    return tuple(map(tuple, found))


def masks_of(
    loader: EpochLoader, values: Mapping[str, Any], count: int
) -> tuple[tuple[NDArray[Any], ...], tuple[str, ...]] | None:
    """Return the first field of masks in the first `count` pictures, and the colors of its values; None without one."""
    kinds = _kinds(loader)
    name = next((name for name in values if kinds.get(name) == "mask"), None)
    if name is None or loader.beton is None:
        return None
    return tuple(values[name][:count].cpu().numpy()), loader.beton.colors(name)


def _kinds(loader: EpochLoader) -> dict[str, str]:
    return {} if loader.beton is None else moving_fields(loader.beton, loader.settings)


def _is_visible(place: Sequence[float], height: int, width: int) -> bool:
    if len(place) == 4:
        return place[2] > place[0] and place[3] > place[1]
    return -0.5 <= place[0] < width - 0.5 and -0.5 <= place[1] < height - 0.5


def _classes_of(places: Sequence[Any], others: Sequence[Any]) -> Any:
    """Return the field that has a class for each box or keypoint: lists of as many numbers or names as the samples have
    `places`; None if there is none."""
    for values in others:
        if isinstance(values, list) and all(
            isinstance(own, list) and len(own) == len(each) and all(isinstance(one, int | str) for one in own)
            for own, each in zip(values, places, strict=True)
        ):
            return values
    return None


def _named(own: int | str, classes: Sequence[str]) -> tuple[str, int]:
    if isinstance(own, int):
        return (classes[own] if 0 <= own < len(classes) else str(own)), own
    return own, classes.index(own) if own in classes else zlib.crc32(own.encode())


def color_of(number: int) -> str:
    """Return the color of a class or field: hues apart by the golden ratio, so that the first ones differ most, and
    light enough for dark pictures."""
    color = np.array(colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.9, 1.0))
    light = color @ [0.2126, 0.7152, 0.0722]  # luminance, by the weights of sRGB
    color += (1 - color) * max(0.45 - light, 0) / (1 - light)
    return f"#{(color * 255).round().astype(np.uint8).tobytes().hex()}"


def marked(picture: NDArray[np.uint8], marks: Sequence[Mark]) -> NDArray[np.uint8]:
    """Return a picture `(H, W, 3)` with its marks: a frame inside of each box, a dot at each keypoint. A small picture
    becomes as many times as large as it needs to have `SIDE` pixels."""
    times = -(-SIDE // min(picture.shape[:2]))
    image = Image.fromarray(picture.repeat(times, 0).repeat(times, 1) if times > 1 else picture)
    draw, line = ImageDraw.Draw(image), max(min(image.size) // 96, 2)
    for mark in sorted(marks, key=lambda mark: -len(mark.place)):  # keypoints above boxes
        color = color_of(mark.number)
        if len(mark.place) == 4:
            left, top, right, bottom = (round(edge * times) for edge in mark.place)
            draw.rectangle((left, top, max(right - 1, left), max(bottom - 1, top)), outline=color, width=line)
        else:
            x, y = ((each + 0.5) * times - 0.5 for each in mark.place)
            size = 2 * line
            draw.ellipse((x - size, y - size, x + size, y + size), fill=color, outline="white")
    return np.asarray(image)
