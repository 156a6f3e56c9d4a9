"""The settings that both loaders share, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import DataError, suggest
from .order import ORDERS

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels scaled to 0–1; torchvision's documented values."""

CROPS = ("resized", "padded")


@dataclass(frozen=True)
class Settings:
    """How images are turned into a batch. See `FFCVLoader` for the meaning of each.

    Raises:
        DataError: naming the setting, its value, and what is allowed.
    """

    batch_size: int
    image_size: int
    train: bool = True
    seed: int = 0
    order: str = "random"
    drop_last: bool = False
    crop: str = "resized"
    scale: tuple[float, float] = (0.25, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = 4
    eval_ratio: float = 224 / 256
    flip: bool = True
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    dtype: torch.dtype = torch.float32
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        def check(name: str, valid: bool, allowed: str) -> None:
            if not valid:
                raise DataError(f"{name}={getattr(self, name)!r} must be {allowed}.")

        check("image_size", isinstance(self.image_size, int) and self.image_size >= 1, "at least 1 pixel")
        check("batch_size", isinstance(self.batch_size, int) and self.batch_size >= 1, "at least 1")
        check("seed", isinstance(self.seed, int) and 0 <= self.seed < 2**63, "an integer from 0 on")
        check("order", self.order in ORDERS, f"an order.{suggest(str(self.order), ORDERS)}"[:-1])
        check("crop", self.crop in CROPS, f"a crop.{suggest(str(self.crop), CROPS)}"[:-1])
        check("scale", 0 < self.scale[0] <= self.scale[1] <= 1, "two shares of the area, 0 < low ≤ high ≤ 1")
        check("ratio", 0 < self.ratio[0] <= self.ratio[1], "two aspect ratios, 0 < low ≤ high")
        check("padding", 0 <= self.padding < self.image_size, "from 0 to less than image_size pixels")
        check("eval_ratio", 0 < self.eval_ratio <= 1, "a share of the shorter side, above 0 and up to 1")
        check("std", len(self.std) == 3 and min(self.std) > 0, "three positive numbers")
        check("mean", len(self.mean) == 3, "three numbers")
        check("dtype", self.dtype in (torch.uint8, torch.float32), "torch.float32 or torch.uint8")
        check("rank", 0 <= self.rank < self.world_size, f"from 0 to world_size - 1 = {self.world_size - 1}")


def check_indices(indices: Any, samples: int) -> NDArray[np.int64]:
    """The subset of samples to load, or all of them.

    Raises:
        DataError: if one is out of range, or none is left.
    """
    if indices is None:
        return np.arange(samples, dtype=np.int64)
    chosen = np.asarray(indices)
    if chosen.ndim != 1 or len(chosen) == 0 or not np.issubdtype(chosen.dtype, np.integer):
        raise DataError(f"indices must be a non-empty list of sample numbers, not {indices!r:.80}.")
    outside = (chosen < 0) | (chosen >= samples)
    if outside.any():
        raise DataError(f"indices holds {chosen[outside][0]}; the data set has samples 0 to {samples - 1}.")
    return chosen.astype(np.int64)
