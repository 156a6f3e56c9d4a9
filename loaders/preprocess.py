"""The evaluation preprocessing as a torchvision transform, for single images outside of a loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import v2

from ..errors import DataError
from .decode.centers import central_crops, fitted
from .image_modes import image_pixels, mode_of
from .image_size import ImageSize, height_width, size_text
from .settings import IMAGENET_MEAN, fill_color

_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "nearest": Image.Resampling.NEAREST,
    "area": Image.Resampling.BOX,
}


class EvaluationCrop(torch.nn.Module):
    """Crop an image and resize it, as `FFCVLoader` does in evaluation.

    Args:
        image_size: side of the result, or its height and width, in pixels.
        ratio: size of a central crop relative to the largest one of this shape, in (0, 1].
        interpolation: `"bilinear"` or `"bicubic"` (antialiased), `"nearest"` or `"area"`.
        eval_crop: `"center"`, `"whole"` or `"fit"`; see `FFCVLoader`.
        mean: the colour around an image that fits, for pixels scaled to 0–1; one value per channel.
        depth: bits of each value, 8 or 16.
    """

    def __init__(
        self,
        image_size: ImageSize,
        ratio: float,
        interpolation: str = "bilinear",
        eval_crop: str = "center",
        mean: Sequence[float] = IMAGENET_MEAN,
        depth: int = 8,
    ) -> None:
        super().__init__()
        self.image_size, self.ratio, self.interpolation = image_size, ratio, interpolation
        self.eval_crop, self.fill, self.mode = eval_crop, fill_color(mean, depth), mode_of(len(mean), depth)

    def forward(self, image: Any) -> Image.Image | torch.Tensor:
        """Return an image of that size: PIL's, of mode RGB or L; else a tensor `(C, H, W)`, see `tensor_of`."""
        if isinstance(image, torch.Tensor) and self.mode not in ("RGB", "L"):
            return self._tensor(image)
        if not isinstance(image, Image.Image | np.ndarray):
            raise DataError(
                f"The preprocessing takes a PIL image or an array (H, W, 3) of uint8, not a {type(image).__name__}."
            )
        if self.mode == "RGB":
            picture = (image if isinstance(image, Image.Image) else Image.fromarray(image)).convert("RGB")
        else:
            try:
                pixels = image_pixels(image, self.mode)[0]
            except DataError as error:
                raise DataError(f"An image does not suit the model: {error}.") from None
            if self.mode != "L":
                return self._tensor(tensor_of(pixels))
            picture = Image.fromarray(pixels)
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

    def _tensor(self, image: torch.Tensor) -> torch.Tensor:
        """Return the crop of a tensor `(C, H, W)`, as `forward`."""
        size = height_width(self.image_size)
        sides = np.array([image.shape[1]]), np.array([image.shape[2]])
        place = [0, 0, *size]
        if self.eval_crop == "center":
            image = v2.functional.crop(image, *central_crops(*sides, size, self.ratio)[0].tolist())
        elif self.eval_crop == "fit":
            place = fitted(*sides, size)[0].tolist()
        if list(image.shape[1:]) != place[2:]:
            image = self._resized(image, place[2], place[3])
        fill: list[float] = list(self.fill)
        if image.is_floating_point():  # bicubic weights are partly negative
            image, fill = image.clamp(0, 1), [level / 0xFFFF for level in fill]
        top, left, height, width = place
        edges = [left, top, size[1] - left - width, size[0] - top - height]
        padded: torch.Tensor = v2.functional.pad(image, edges, fill=fill)
        return padded

    def _resized(self, image: torch.Tensor, height: int, width: int) -> torch.Tensor:
        if self.interpolation != "nearest":
            filter_ = v2.InterpolationMode(self.interpolation)
            resized: torch.Tensor = v2.functional.resize(image, [height, width], filter_, antialias=True)
            return resized
        rows, columns = (
            _nearest(before, after) for before, after in zip(image.shape[1:], (height, width), strict=True)
        )
        return image[:, rows][:, :, columns]

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
    depth: int = 8,
) -> v2.Compose:
    """Return the transform from an image to the `(C, H, W)` float32 tensor that `FFCVLoader` evaluates.

    It takes PIL images and arrays, of any mode if there are three channels of 8 bits. Other images have the channels of
    `mean`, to which those of 8 bits are converted, and the bits of `depth`; several channels of 16 bits are arrays.

    Pixels equal the loader's with `"nearest"`. With `"bicubic"` they are within two of 255 levels, with `"bilinear"`
    within three, and within ten for JPEGs that it decodes at half of their size; with `"area"` within 17, and within 40
    for images that it enlarges. Tests state these differences.
    """
    return v2.Compose(
        [
            EvaluationCrop(image_size, ratio, interpolation, eval_crop, mean, depth),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(mean), list(std)),
        ]
    )


def tensor_of(pixels: NDArray[Any]) -> torch.Tensor:
    """Return pixels `(H, W)` or `(H, W, C)` as a tensor `(C, H, W)`: uint8, or of 16 bits float32 from 0 to 1."""
    planes = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
    if pixels.dtype == np.uint8:
        return torch.from_numpy(planes.copy())
    return torch.from_numpy(planes.astype(np.float32)) / 0xFFFF


def _nearest(before: int, after: int) -> torch.Tensor:
    """Return the line nearest to each of `after` lines, of `before`: Pillow's rounding, by steps summed in doubles."""
    step = before / after
    at = np.cumsum([0.5 * step, *[step] * (after - 1)])
    return torch.from_numpy(np.minimum(at.astype(np.int64), before - 1))
