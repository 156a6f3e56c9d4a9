"""The evaluation preprocessing as a torchvision transform, for single images outside of a loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from ..errors import DataError
from .decode.centers import central_crops
from .image_size import ImageSize, height_width, size_text

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
    "area": Image.Resampling.BOX,
}


class EvaluationCrop(torch.nn.Module):
    """Crop the centre of a PIL image and resize it, as `FFCVLoader` does in evaluation.

    Args:
        image_size: side of the result, or its height and width, in pixels.
        ratio: size of the crop relative to the largest one of this shape, in (0, 1].
        interpolation: `"bilinear"` or `"bicubic"` (antialiased), `"nearest"` or `"area"`.
    """

    def __init__(self, image_size: ImageSize, ratio: float, interpolation: str = "bilinear") -> None:
        super().__init__()
        self.image_size, self.ratio, self.interpolation = image_size, ratio, interpolation

    def forward(self, image: Any) -> Image.Image:
        """Return an RGB image of that size."""
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        if not isinstance(image, Image.Image):
            raise DataError(
                f"The preprocessing takes a PIL image or an array (H, W, 3) of uint8, not a {type(image).__name__}."
            )
        picture: Image.Image = image.convert("RGB")
        size = height_width(self.image_size)
        (box,) = central_crops(np.array([picture.height]), np.array([picture.width]), size, self.ratio)
        top, left, height, width = map(int, box)
        crop = picture.crop((left, top, left + width, top + height))
        if (height, width) == size:  # as the loader, which copies such pixels
            return crop
        return crop.resize(size[::-1], _FILTERS[self.interpolation])

    def extra_repr(self) -> str:
        """Return the arguments."""
        return f"{size_text(self.image_size)}, ratio={self.ratio:g}, interpolation={self.interpolation!r}"


def evaluation_transform(
    image_size: ImageSize,
    ratio: float,
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str = "bilinear",
) -> v2.Compose:
    """Return the transform from a PIL image to the `(3, H, W)` float32 tensor that `FFCVLoader` evaluates.

    Pixels are within three of 255 levels of the loader's, with `"bilinear"`; within seven for JPEGs that it decodes at
    half of their size, and within 17 with `"area"`. A test states these differences.
    """
    return v2.Compose(
        [
            EvaluationCrop(image_size, ratio, interpolation),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(mean), list(std)),
        ]
    )
