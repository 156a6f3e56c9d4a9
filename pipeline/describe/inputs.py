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
    """What an image must become before the model sees it, and the names of what it returns. The facts of a run's
    history have it; `recipe.yaml` and the metadata of weights and exported files are written from there."""

    image_size: ImageSize  # in evaluation
    eval_ratio: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    eval_crop: str = "center"
    classes: tuple[str, ...] = ()  # or labels; empty if the data has no names
    channels: int = 3
    depth: int = 8  # bits of each value
    colors: tuple[str, ...] = ()  # of the classes of masks, "#rrggbb", or "" for the usual one

    @classmethod
    def of(cls, train: EpochLoader, val: EpochLoader | None, eval_size: ImageSize) -> Self:
        loader = val or train
        used = loader.settings
        return cls(
            eval_size, float(used.eval_ratio), tuple(map(float, used.mean)), tuple(map(float, used.std)),
            used.interpolation, used.eval_crop, tuple(train.classes), loader.channels, loader.depth, train.colors,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        values: Any = {name: tuple(each) if isinstance(each, list) else each for name, each in saved.items()}
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self).items()
        return {
            name: list(each) if isinstance(each, tuple) else each for name, each in values if name != "colors" or each
        }

    def transform(self) -> Evaluation:
        """For evaluation, of a picture `(C, H, W)`."""
        from ...loaders.decode.preprocess import Evaluation

        names = ("image_size", "eval_crop", "eval_ratio", "interpolation", "mean", "std")
        options = LoaderOptions(batch_size=1, train=False, **{name: getattr(self, name) for name in names})
        return Evaluation(options, self.depth)


TRAINED = ("inputs", "task")
"""The facts of a run that its weights cannot be used without."""


def metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return those of the `TRAINED` facts that it has, as JSON texts by name."""
    return {name: json.dumps(facts[name], ensure_ascii=False) for name in TRAINED if name in facts}
