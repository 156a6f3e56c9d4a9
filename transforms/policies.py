"""RandAugment, TrivialAugment and AugMix: random operations on each training image, before it is in a batch.

In a Pipeline the loader does them (`loader_settings` is what it is told); alone, `image` does them to one image.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..checks import is_number, is_whole
from ..errors import PlanError
from .base import Kind, Transform

if TYPE_CHECKING:
    from PIL.Image import Image

# As torchvision needs them, and the loaders (loaders/policies.py) take them.
_BINS, _LONGEST, _MOST_SEVERE = 1000, 32, 10


@dataclass(frozen=True)
class RandAugment(Transform):
    """Does `num_ops` of 14 operations to each training image, drawn at random, all of one strength.

    The operations: identity, shear and translation along either axis, rotation, brightness, colour, contrast,
    sharpness, posterize, solarize, autocontrast, equalize; as torchvision's `RandAugment` does them.

    Attributes:
        num_ops: operations on each image. Whole number from 1 to 32. Default 2, torchvision's.
        magnitude: their strength: the number of a bin, from 0 to `num_magnitude_bins` - 1. Default 9,
            torchvision's; the source tunes it for each data set and model.
        num_magnitude_bins: steps from no effect to the largest. Whole number from 2 to 1000. Default 31,
            torchvision's, after the source's scale from 0 to 30.

    Raises:
        PlanError: at construction, if a value is out of range.

    Source: Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space",
    2020, arXiv:1909.13719.
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31

    kind: ClassVar[Kind] = "image"
    source: ClassVar[str] = "Cubuk et al. 2020, arXiv:1909.13719"

    def __post_init__(self) -> None:
        _check_whole(self, "num_ops", 1, _LONGEST)
        _check_whole(self, "num_magnitude_bins", 2, _BINS)
        _check_whole(self, "magnitude", 0, self.num_magnitude_bins - 1)

    @property
    def loader_settings(self) -> dict[str, Any]:
        """The loader's setting `policy`."""
        return {"policy": {"name": "rand_augment", **dataclasses.asdict(self)}}

    def image(self, image: Image) -> Any:
        """One image, changed; the random numbers are torch's global ones."""
        from torchvision.transforms import v2

        return v2.RandAugment(self.num_ops, self.magnitude, self.num_magnitude_bins)(image)


@dataclass(frozen=True)
class TrivialAugment(Transform):
    """Does one of 14 operations to each training image, drawn at random, its strength, too.

    The operations of `RandAugment` in the source's wide ranges; as torchvision's `TrivialAugmentWide`.

    Attributes:
        num_magnitude_bins: strengths to choose from. Whole number from 2 to 1000. Default 31, the source's.

    Raises:
        PlanError: at construction, if the value is out of range.

    Source: Müller and Hutter, "TrivialAugment: Tuning-free yet state-of-the-art data augmentation", 2021,
    arXiv:2103.10158.
    """

    num_magnitude_bins: int = 31

    kind: ClassVar[Kind] = "image"
    source: ClassVar[str] = "Müller and Hutter 2021, arXiv:2103.10158"

    def __post_init__(self) -> None:
        _check_whole(self, "num_magnitude_bins", 2, _BINS)

    @property
    def loader_settings(self) -> dict[str, Any]:
        """The loader's setting `policy`."""
        return {"policy": {"name": "trivial_augment", **dataclasses.asdict(self)}}

    def image(self, image: Image) -> Any:
        """One image, changed; the random numbers are torch's global ones."""
        from torchvision.transforms import v2

        return v2.TrivialAugmentWide(self.num_magnitude_bins)(image)


@dataclass(frozen=True)
class AugMix(Transform):
    """Mixes each training image with what `width` short chains of random operations make of it.

    The 13 operations of `RandAugment` without identity; as torchvision's `AugMix`. The source's further loss
    on the consistency of predictions is not part of it, as it is not of torchvision's.

    Attributes:
        severity: largest strength of an operation, in tenths of its range. Whole number from 1 to 10.
            Default 3, the source's.
        width: chains. Whole number from 1 to 32. Default 3, the source's.
        depth: operations of a chain, a whole number from 1 to 32; -1: 1 to 3, at random. Default -1, the
            source's.
        alpha: of the Beta distribution between image and mixture and of the Dirichlet distribution between the
            chains. From 0.01 to 100; the larger, the more even the weights. Default 1, the source's.

    Raises:
        PlanError: at construction, if a value is out of range.

    Source: Hendrycks et al., "AugMix: A simple data processing method to improve robustness and uncertainty",
    2020, arXiv:1912.02781.
    """

    severity: int = 3
    width: int = 3
    depth: int = -1
    alpha: float = 1.0

    kind: ClassVar[Kind] = "image"
    source: ClassVar[str] = "Hendrycks et al. 2020, arXiv:1912.02781"

    def __post_init__(self) -> None:
        _check_whole(self, "severity", 1, _MOST_SEVERE)
        _check_whole(self, "width", 1, _LONGEST)
        if self.depth != -1:
            _check_whole(self, "depth", 1, _LONGEST, " or -1, for 1 to 3 at random")
        alpha: Any = self.alpha
        if not is_number(alpha, "[0.01, 100]"):
            raise PlanError(f"AugMix(alpha={alpha!r}): give a number from 0.01 to 100.")

    @property
    def loader_settings(self) -> dict[str, Any]:
        """The loader's setting `policy`."""
        return {"policy": {"name": "aug_mix", **dataclasses.asdict(self)}}

    def image(self, image: Image) -> Any:
        """One image, mixed; the random numbers are torch's global ones."""
        from torchvision.transforms import v2

        return v2.AugMix(self.severity, self.width, self.depth, self.alpha)(image)


def _check_whole(owner: object, field: str, low: int, high: int, other: str = "") -> None:
    value = getattr(owner, field)
    if not is_whole(value, low, high):
        raise PlanError(
            f"{type(owner).__name__}({field}={value!r}): give a whole number from {low} to {high}{other}."
        )


__all__ = ["AugMix", "RandAugment", "TrivialAugment"]
