"""The image of evaluation, of a picture in memory: what `FFCVLoader` makes of it as a sample, bit for bit."""

import dataclasses
import io
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ...common.errors import DataError
from ..beton.image_modes import RGB, mode_of
from ..beton.layout import MODE_JPEG, MODE_RAW
from ..image_size import size_text
from ..native import jpegs, library
from ..options import LoaderOptions
from .augmentation import draw_choices
from .decoder import Group, Workspaces
from .moving import Motion, motions
from .pictures import JPEG_FORMATS, LONGEST, UnreadableError, pixels_of, reading, turn_of


class Evaluation:
    """Make the image `(C, H, W)` that `FFCVLoader` evaluates, of a picture, bit for bit; also for predictions, exports
    and `TorchLoader`. `settings` are a loader's, `depth` is 8 or 16 bits. Pickles; thread-safe."""

    def __init__(self, settings: LoaderOptions, depth: int = 8) -> None:
        self.settings = dataclasses.replace(settings, train=False)
        self.depth, self.channels = depth, len(settings.mean)
        self._workspaces = Workspaces()

    def __reduce__(self) -> Any:
        return type(self), (self.settings, self.depth)

    def __call__(self, picture: Any, *masks: torch.Tensor) -> Any:
        """Return the image of a file (path or bytes, made upright), a PIL image, or an array or tensor `(h, w)`, `(h,
        w, c)` or `(c, h, w)` of uint8 or uint16; with masks `(h, w)` of the picture, also those, moved."""
        image, size = self.measured(picture)
        if not masks:
            return image
        for mask in masks:
            if tuple(mask.shape) != size:
                raise DataError(
                    f"A mask has the shape {tuple(mask.shape)}, but its picture has {size_text(size)} pixels (height × "
                    "width), upright. Pass a class index for each of them."
                )
        motion = self._motion(size)
        return image, *(torch.from_numpy(motion.mask(mask.numpy()).copy()) for mask in masks)

    def measured(self, picture: Any) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the image of a picture, and the picture's height and width."""
        if not isinstance(picture, str | Path | bytes | Image.Image | np.ndarray | torch.Tensor):
            raise DataError(
                "The preprocessing takes the path or the bytes of an image file, a PIL image, or an array, not a "
                f"{type(picture).__name__}."
            )
        name = str(picture) if isinstance(picture, str | Path) else "An image"
        try:
            if isinstance(picture, str | Path):  # not by Pillow, whose decoder is another one than FFCV's
                picture = Path(picture).read_bytes()
            return self._image(picture)
        except (OSError, UnreadableError) as error:
            raise DataError(f"{name} cannot be read as an image: {error}.") from error
        except DataError as error:
            raise DataError(f"{name} does not suit the model: {error}.") from None

    def back(self, mask: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
        """Return class indices `(H, W)` of the image as those of its picture of this height and width: the nearest
        ones, and 255 where the image shows nothing of the picture."""
        return self._motion(size).back(mask, size)

    def _motion(self, size: tuple[int, int]) -> Motion:
        keys, (height, width) = np.zeros(1, np.uint64), size
        choices = draw_choices(self.settings, keys, np.array([height]), np.array([width]))
        return next(iter(motions(self.settings, choices, slice(0, 1))))

    def _image(self, picture: Any) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the image, and the picture's height and width."""
        if isinstance(picture, bytes) and (size := self._size_of_jpeg(picture)) is not None:
            image = self._load(MODE_JPEG, size, np.frombuffer(picture, np.uint8))
            if image is not None:  # otherwise it is damaged, but Pillow may read it, as `convert` does
                return image, size
        pixels, _ = pixels_of(picture, mode_of(self.channels, self.depth))
        height, width = pixels.shape[:2]
        if max(height, width) > LONGEST:
            raise DataError(f"its longest side is {max(height, width)} pixels; the limit is {LONGEST}")
        image = self._load(MODE_RAW, (height, width), np.ascontiguousarray(pixels))
        if image is None:
            raise MemoryError(f"There is no memory for an image of {height} × {width} pixels.")
        return image, (height, width)

    def _size_of_jpeg(self, data: bytes) -> tuple[int, int] | None:
        """Return height and width of a JPEG that `convert` copies; None for anything else."""
        if (self.channels, self.depth) != RGB or jpegs.frame_type(data) not in jpegs.DECODED_FRAMES:
            return None
        with reading(), Image.open(io.BytesIO(data)) as image:
            if image.format not in JPEG_FORMATS or image.mode != "RGB" or turn_of(image) is not None:
                return None
            return image.height, image.width

    def _load(self, mode: int, size: tuple[int, int], stored: NDArray[Any]) -> torch.Tensor | None:
        """Return the image of a stored picture; None if it cannot be decoded."""
        shape = (1, 1, *self.settings.size, self.channels)
        images = torch.empty(shape, dtype=self.settings.dtype, device="cpu")  # not torch's default: C writes to it
        sizes = np.array(size[:1]), np.array(size[1:])
        none = np.zeros(1, np.int64)
        draw = self._group.draw(none.astype(np.uint64), none, 0, sizes, images)
        part = self._group.part(draw, slice(0, 1), images)
        columns: tuple[NDArray[Any], ...] = (
            np.full(1, -1, np.int32), np.full(1, mode, np.int32), sizes[1].astype(np.uint16),
            sizes[0].astype(np.uint16), none.astype(np.uint64), np.full(1, stored.nbytes, np.uint64),
        )  # fmt: skip
        samples = library.Samples(*map(library.address, columns), self.channels, self.depth // 8)
        with self._workspaces.lend() as workspace:
            status = library.library().dt_load_picture(
                workspace, samples, library.address(stored), part.views(), library.Limits(None, library.MOST_MEMORY)
            )  # fmt: skip
        return images[0, 0].permute(2, 0, 1).contiguous() if status == library.OK else None

    @cached_property
    def _group(self) -> Group:
        return Group(self.settings, 0, 1, (), (self.channels, self.depth))

    def __repr__(self) -> str:
        own = self.settings
        crop = f"ratio={own.eval_ratio:g}" if own.eval_crop == "center" else f"eval_crop={own.eval_crop!r}"
        return f"Evaluation({size_text(own.image_size)}, {crop}, interpolation={own.interpolation!r})"
