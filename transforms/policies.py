"""RandAugment, TrivialAugment and AugMix: random operations on each training image, before batching.

In a Pipeline the loader applies them, configured by `loader_settings`; `image` applies them to a single image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..common.checks import is_whole
from ..common.errors import PlanError
from .base import Kind, Transform
from .common.checks import check_range

if TYPE_CHECKING:
    from PIL.Image import Image

# As torchvision requires, and as the loaders (loaders/decode/policies.py) accept.
_BINS, _LONGEST, _MOST_SEVERE = 1000, 32, 10


class _Policy(Transform):
    """Operations that the loader knows by `_name`, and torchvision by the class `_torchvision`, with the fields as
    arguments."""

    kind: ClassVar[Kind] = "image"
    _name: ClassVar[str]
    _torchvision: ClassVar[str]

    @property
    def loader_settings(self) -> dict[str, Any]:
        return {"policy": {"name": self._name, **vars(self)}}

    def image(self, image: Image) -> Any:
        """Return one image, changed, with random numbers from torch's global generator."""
        from torchvision.transforms import v2

        return getattr(v2, self._torchvision)(*vars(self).values())(image)


@dataclass(frozen=True)
class RandAugment(_Policy):
    """Apply `num_ops` of 14 operations to each training image, drawn at random, all of the same magnitude.

    The operations are those of torchvision's `RandAugment`: identity, shear and translation along either axis,
    rotation, brightness, colour, contrast, sharpness, posterize, solarize, autocontrast, equalize.

    Attributes:
        num_ops: operations per image. Integer from 1 to 32. Default 2, as in torchvision.
        magnitude: their strength, as a bin index from 0 to `num_magnitude_bins` - 1. Default 9, as in
            torchvision; the paper tunes it for each data set and model.
        num_magnitude_bins: number of bins from no effect to the strongest. Integer from 2 to 1000. Default 31, as
            in torchvision, after the paper's scale from 0 to 30.

    Raises:
        PlanError: at construction, if a value is out of range.

    Source: Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space",
    2020, arXiv:1909.13719.

    Example::

        >>> pipeline = pipeline.transform(RandAugment(num_ops=2, magnitude=9))
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31

    _name: ClassVar[str] = "rand_augment"
    _torchvision: ClassVar[str] = "RandAugment"
    source: ClassVar[str] = "Cubuk et al. 2020, arXiv:1909.13719"

    def __post_init__(self) -> None:
        _check_whole(self, "num_ops", 1, _LONGEST)
        _check_whole(self, "num_magnitude_bins", 2, _BINS)
        _check_whole(self, "magnitude", 0, self.num_magnitude_bins - 1)


@dataclass(frozen=True)
class TrivialAugment(_Policy):
    """Apply one of 14 operations to each training image, with both operation and magnitude drawn at random.

    The operations of `RandAugment` in the paper's wide ranges, as in torchvision's `TrivialAugmentWide`.

    Attributes:
        num_magnitude_bins: number of magnitudes. Integer from 2 to 1000. Default 31, as in the paper.

    Raises:
        PlanError: at construction, if the value is out of range.

    Source: Müller and Hutter, "TrivialAugment: Tuning-free yet state-of-the-art data augmentation", 2021,
    arXiv:2103.10158.

    Example::

        >>> pipeline = pipeline.transform(TrivialAugment())
    """

    num_magnitude_bins: int = 31

    _name: ClassVar[str] = "trivial_augment"
    _torchvision: ClassVar[str] = "TrivialAugmentWide"
    source: ClassVar[str] = "Müller and Hutter 2021, arXiv:2103.10158"

    def __post_init__(self) -> None:
        _check_whole(self, "num_magnitude_bins", 2, _BINS)


@dataclass(frozen=True)
class AugMix(_Policy):
    """Mix each training image with `width` copies altered by short chains of random operations.

    The operations are the 13 of `RandAugment` without identity, as in torchvision's `AugMix`. As there, the
    paper's additional consistency loss is not included.

    Attributes:
        severity: largest magnitude of an operation, in tenths of its range. Integer from 1 to 10. Default 3, as in
            the paper.
        width: number of chains. Integer from 1 to 32. Default 3, as in the paper.
        depth: operations per chain. Integer from 1 to 32, or -1 for 1 to 3 at random. Default -1, as in the
            paper.
        alpha: parameter of the Beta distribution between image and mixture and of the Dirichlet distribution
            between the chains. From 0.01 to 100; larger values give more even weights. Default 1, as in the
            paper.

    Raises:
        PlanError: at construction, if a value is out of range.

    Source: Hendrycks et al., "AugMix: A simple data processing method to improve robustness and uncertainty",
    2020, arXiv:1912.02781.

    Example::

        >>> pipeline = pipeline.transform(AugMix(severity=3))
    """

    severity: int = 3
    width: int = 3
    depth: int = -1
    alpha: float = 1.0

    _name: ClassVar[str] = "aug_mix"
    _torchvision: ClassVar[str] = "AugMix"
    source: ClassVar[str] = "Hendrycks et al. 2020, arXiv:1912.02781"

    def __post_init__(self) -> None:
        _check_whole(self, "severity", 1, _MOST_SEVERE)
        _check_whole(self, "width", 1, _LONGEST)
        if self.depth != -1:
            _check_whole(self, "depth", 1, _LONGEST, " or -1, for 1 to 3 at random")
        check_range(self, "alpha", "[0.01, 100]")


def _check_whole(owner: object, field: str, low: int, high: int, other: str = "") -> None:
    value = getattr(owner, field)
    if not is_whole(value, low, high):
        raise PlanError(
            f"{type(owner).__name__}({field}={value!r}): pass an integer from {low} to {high}{other}."
        )
