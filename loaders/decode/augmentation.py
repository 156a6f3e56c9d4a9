"""The augmentations of a batch's images, decided before any pixel is touched."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..options import LoaderOptions
from . import draws
from .draws import Drawn

# Which draws of a sample's key decide what; the crop uses 0 to 39, a policy those from 100. Each keeps its meaning.
FLIP, CUTOUT, COLOR, REPLACEMENT = 40, 41, 43, 50


@dataclass(frozen=True)
class Choices:
    """The augmentations for n images."""

    # (n, 4): top, left, height and width of each crop, in pixels of the stored image. For the padded crop with
    # reflected edges: the row and column shift of the image, and its size.
    boxes: NDArray[np.int64]
    flips: NDArray[np.bool_]
    # (n, 4): factors of brightness, contrast and saturation, and the index of the order in which they are applied,
    # one of six; empty without color jitter.
    color: NDArray[np.float64]
    corners: NDArray[np.int64]  # (n, 2): top and left of the square that is cut out; empty without CutOut
    policy: Drawn | None
    # (n, 4): top, left, height and width of each crop in the output, whose other pixels are filled; None: all of it.
    places: NDArray[np.int64] | None = None


def draw_choices(
    settings: LoaderOptions, keys: NDArray[np.uint64], heights: NDArray[np.int64], widths: NDArray[np.int64],
    flips: NDArray[np.bool_] | None = None,
) -> Choices:  # fmt: skip
    """Return the choices for images with these `keys` and stored sizes, each `(n,)`; `flips` of None are drawn, too."""
    boxes, places = _crops(settings, keys, heights, widths)
    if not settings.train:
        flips = np.zeros(len(heights), dtype=np.bool_)
        return Choices(boxes, flips, np.empty((0, 4)), np.empty((0, 2), dtype=np.int64), None, places)
    if flips is None:
        flips = draws.uniforms(keys, FLIP, 1)[:, 0] < (0.5 if settings.flip else 0.0)
    corners = np.empty((0, 2), dtype=np.int64)
    if settings.cutout:  # as FFCV's `Cutout`: the square is inside the image, uniformly distributed
        free = np.array(settings.size) - settings.cutout + 1
        corners = (draws.uniforms(keys, CUTOUT, 2) * free).astype(np.int64)
    policy = None if settings.policy is None else draws.draw_policy(settings.policy, keys, settings.size)
    return Choices(boxes, flips, _factors(keys, settings), corners, policy, places)


def alternating(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return flips `(n,)`: random in epoch 0, and inverted in every odd epoch."""
    keys = draws.sample_keys(seed, 0, indices)
    flips: NDArray[np.bool_] = draws.uniforms(keys, FLIP, 1)[:, 0] < 0.5
    return ~flips if epoch % 2 else flips


def _crops(
    settings: LoaderOptions, keys: NDArray[np.uint64], heights: NDArray[np.int64], widths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    crop, size = settings.active_crop, settings.size
    if crop == "padded":
        reach, sides = settings.padding, np.stack([heights, widths], axis=1)
        offsets = (draws.uniforms(keys, 0, 2) * (2 * reach + 1)).astype(np.int64) - reach
        if not settings.pads:
            return np.concatenate([offsets, sides], axis=1), None
        # What is left of the shifted images inside their frame, and where it is in it.
        left = sides - np.abs(offsets)
        corners, into = (np.maximum(each, 0) for each in (-offsets, offsets))
        return np.concatenate([corners, left], axis=1), np.concatenate([into, left], axis=1)
    if crop == "center":
        return central_crops(heights, widths, size, settings.eval_ratio), None
    if crop == "random":  # each place as likely, as torchvision's `RandomCrop`
        places = np.stack([heights - size[0] + 1, widths - size[1] + 1], axis=1)
        corners = (draws.uniforms(keys, 0, 2) * places).astype(np.int64)
        return np.concatenate([corners, np.full((len(keys), 2), size, dtype=np.int64)], axis=1), None
    if crop == "resized":
        scale, ratio = (np.array(pair, dtype=np.float64) for pair in (settings.scale, settings.ratio))
        return draws.random_resized_crops(keys, heights, widths, scale, ratio), None
    none = np.zeros_like(heights)
    whole = np.stack([none, none, heights, widths], axis=1)
    return whole, fitted(heights, widths, size) if crop == "fit" else None


def _factors(keys: NDArray[np.uint64], settings: LoaderOptions) -> NDArray[np.float64]:
    """Return factors as torchvision's `ColorJitter.get_params`: each uniform around 1, in a random order."""
    if not any(settings.color_jitter):
        return np.empty((0, 4))
    drawn: NDArray[np.float64] = draws.uniforms(keys, COLOR, 4)
    for k, strength in enumerate(settings.color_jitter):
        low, high = max(0.0, 1.0 - strength), 1.0 + strength
        drawn[:, k] = low + (high - low) * drawn[:, k]
    drawn[:, 3] = np.floor(drawn[:, 3] * 6)
    return drawn


def central_crops(
    heights: NDArray[np.int64], widths: NDArray[np.int64], size: tuple[int, int], ratio: float
) -> NDArray[np.int64]:
    """Return central crops `(n, 4)`: top, left, height and width in pixels, rounded down, as FFCV's, of the shape of
    the output's `size` (height, width); `ratio` is their size relative to the largest such crop."""
    height, width = size
    tall = heights * width <= widths * height  # the image's height limits them
    down = np.where(tall, heights, widths * height / width)
    across = np.where(tall, heights * width / height, widths)
    h, w = (np.maximum(np.floor(sides * ratio).astype(np.int64), 1) for sides in (down, across))
    return np.stack([(heights - h) // 2, (widths - w) // 2, h, w], axis=1)


def fitted(heights: NDArray[np.int64], widths: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.int64]:
    """Return where full images go, scaled to fit into the output's `size` (height, width) in their aspect ratio, to the
    nearest pixel (halves to even), and centered, `(n, 4)`: top, left, height and width."""
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
