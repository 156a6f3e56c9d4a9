"""The evaluation preprocessing as a torchvision transform, for single images outside of a loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from ..errors import DataError
from .decode.centers import central_crops, fitted
from .image_size import ImageSize, height_width, size_text
from .settings import IMAGENET_MEAN, fill_color

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
    "area": Image.Resampling.BOX,
}


class EvaluationCrop(torch.nn.Module):
    """Crop a PIL image and resize it, as `FFCVLoader` does in evaluation.

    Args:
        image_size: side of the result, or its height and width, in pixels.
        ratio: size of a central crop relative to the largest one of this shape, in (0, 1].
        interpolation: `"bilinear"` or `"bicubic"` (antialiased), `"nearest"` or `"area"`.
        eval_crop: `"center"`, `"whole"` or `"fit"`; see `FFCVLoader`.
        mean: the colour around an image that fits, for pixels scaled to 0–1.
    """

    def __init__(
        self,
        image_size: ImageSize,
        ratio: float,
        interpolation: str = "bilinear",
        eval_crop: str = "center",
        mean: Sequence[float] = IMAGENET_MEAN,
    ) -> None:
        super().__init__()
        self.image_size, self.ratio, self.interpolation = image_size, ratio, interpolation
        self.eval_crop, self.fill = eval_crop, fill_color(mean)

    def forward(self, image: Any) -> Image.Image:
        """Return an RGB image of that size."""
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        if not isinstance(image, Image.Image):
            raise DataError(
                f"The preprocessing takes a PIL image or an array (H, W, 3) of uint8, not a {type(image).__name__}."
            )
        picture: Image.Image = image.convert("RGB")
        size, resampling = height_width(self.image_size), _FILTERS[self.interpolation]
        if self.eval_crop == "fit":
            return fit(picture, size, resampling, self.fill)
        if self.eval_crop == "whole":
            return picture.resize(size[::-1], resampling)
        (box,) = central_crops(np.array([picture.height]), np.array([picture.width]), size, self.ratio)
        top, left, height, width = map(int, box)
        crop = picture.crop((left, top, left + width, top + height))
        if (height, width) == size:  # as the loader, which copies such pixels
            return crop
        return crop.resize(size[::-1], resampling)

    def extra_repr(self) -> str:
        """Return the arguments."""
        what = f"ratio={self.ratio:g}" if self.eval_crop == "center" else f"eval_crop={self.eval_crop!r}"
        return f"{size_text(self.image_size)}, {what}, interpolation={self.interpolation!r}"


def fit(
    picture: Image.Image, size: tuple[int, int], resampling: Image.Resampling, fill: tuple[int, ...]
) -> Image.Image:
    """Return the full image, scaled to fit into `size` (height, width) and centred on the colour `fill`."""
    (place,) = fitted(np.array([picture.height]), np.array([picture.width]), size)
    top, left, height, width = map(int, place)
    whole = Image.new(picture.mode, size[::-1], fill)
    whole.paste(picture.resize((width, height), resampling), (left, top))
    return whole


def evaluation_transform(
    image_size: ImageSize,
    ratio: float,
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str = "bilinear",
    eval_crop: str = "center",
) -> v2.Compose:
    """Return the transform from a PIL image to the `(3, H, W)` float32 tensor that `FFCVLoader` evaluates.

    Pixels equal the loader's with `"nearest"`. With `"bicubic"` they are within two of 255 levels, with `"bilinear"`
    within three, and within ten for JPEGs that it decodes at half of their size; with `"area"` within 17, and within 40
    for images that it enlarges. Tests state these differences.
    """
    return v2.Compose(
        [
            EvaluationCrop(image_size, ratio, interpolation, eval_crop, mean),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(mean), list(std)),
        ]
    )
