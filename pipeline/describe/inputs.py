"""What a trained model takes: the preprocessing of its evaluation, and the names of its classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from ...loaders.epochs import EpochLoader
from ...loaders.image_size import ImageSize
from ...loaders.options import LoaderOptions

if TYPE_CHECKING:
    from ...loaders.decode.preprocess import Evaluation


@dataclass(frozen=True)
class Inputs:
    """What an image must become before the model sees it, and the names of what the model returns.

    A run keeps it in the facts of its history, as `to_dict`. The other places that have it are written from there:
    `recipe.yaml` (the key `trained`), and the metadata of `model.safetensors` and of exported files.

    Attributes:
        image_size: side of the images in evaluation, or height and width, in pixels.
        eval_ratio: size of the central crop relative to the largest one of this shape.
        mean, std: of each channel, for pixels scaled to 0–1. The mean is also the colour around an image that fits.
        interpolation, eval_crop: as in `FFCVLoader`.
        classes: names of the classes or labels; empty if the data has none.
        channels, depth: of the images: their number of channels, and the bits of each value, 8 or 16.
    """

    image_size: ImageSize
    eval_ratio: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    eval_crop: str = "center"
    classes: tuple[str, ...] = ()
    channels: int = 3
    depth: int = 8

    @classmethod
    def of(cls, train: EpochLoader, val: EpochLoader | None, eval_size: ImageSize) -> Self:
        """Return that of a training's loaders."""
        loader = val or train
        used = loader.settings
        return cls(
            eval_size,
            float(used.eval_ratio),
            tuple(map(float, used.mean)),
            tuple(map(float, used.std)),
            used.interpolation,
            used.eval_crop,
            tuple(train.classes),
            loader.channels,
            loader.depth,
        )

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Return what `to_dict` gave."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
        }
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }

    def transform(self) -> Evaluation:
        """Return what makes the image of evaluation of a picture, `(C, H, W)`."""
        from ...loaders.decode.preprocess import Evaluation

        own: Any = self  # its names are checked here
        options = LoaderOptions(
            batch_size=1,
            image_size=self.image_size,
            train=False,
            eval_crop=own.eval_crop,
            eval_ratio=self.eval_ratio,
            interpolation=own.interpolation,
            mean=self.mean,
            std=self.std,
        )
        return Evaluation(options, self.depth)


TRAINED = ("inputs", "task")
"""The facts of a run that its weights cannot be used without."""


def metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return a run's `TRAINED` facts, those that it has, as metadata of a file: JSON texts by name."""
    return {name: json.dumps(facts[name], ensure_ascii=False) for name in TRAINED if name in facts}
