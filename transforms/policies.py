"""RandAugment, TrivialAugment, AugMix and ThreeAugment: random operations on each training image, before batching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ..common.checks import is_whole
from ..common.errors import PlanError
from ..common.options.config import Kind, Whole, Within
from ..common.three_augment import three_augment
from .base import Fraction, Transform

if TYPE_CHECKING:
    from PIL.Image import Image

# As torchvision requires, and as the loaders (loaders/decode/policies.py) accept.
Bins = Annotated[int, Whole(2, 1000)]
Operations = Annotated[int, Whole(1, 32)]
Severity = Annotated[int, Whole(1, 10)]
Depth = Annotated[
    int,
    Kind(
        lambda value: is_whole(value, -1, 32) and value != 0,
        "an integer from 1 to 32 or -1, for 1 to 3 at random",
    ),
]


class _Policy(Transform):
    """Operations that the loader knows by `_name`, and torchvision by the class `_torchvision`, with these fields."""

    kind = "image"
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
    rotation, brightness, color, contrast, sharpness, posterize, solarize, autocontrast, equalize.

    Attributes:
        num_ops: operations per image. Integer from 1 to 32. Default 2, as in torchvision.
        magnitude: strength, bin 0 to `num_magnitude_bins` - 1. Default 9, as in torchvision; tuned in the paper.
        num_magnitude_bins: bins from no effect to strongest. Integer from 2 to 1000. Default 31, as in torchvision.

    Source: Cubuk et al., "RandAugment", 2020, arXiv:1909.13719.

    Example::

        >>> pipeline = pipeline.transform(RandAugment(num_ops=2, magnitude=9))
    """

    num_ops: Operations = 2
    magnitude: int = 9
    num_magnitude_bins: Bins = 31

    _name = "rand_augment"
    _torchvision = "RandAugment"
    source = "Cubuk et al. 2020, arXiv:1909.13719"

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.num_magnitude_bins - 1
        if not 0 <= self.magnitude <= most:
            raise PlanError(f"RandAugment(magnitude={self.magnitude}): pass an integer from 0 to {most}.")


@dataclass(frozen=True)
class TrivialAugment(_Policy):
    """Apply one of 14 operations to each training image, with both operation and magnitude drawn at random.

    The operations of `RandAugment` in the paper's wide ranges, as in torchvision's `TrivialAugmentWide`.

    Attributes:
        num_magnitude_bins: number of magnitudes. Integer from 2 to 1000. Default 31, as in the paper.

    Source: Müller and Hutter, "TrivialAugment", 2021, arXiv:2103.10158.

    Example::

        >>> pipeline = pipeline.transform(TrivialAugment())
    """

    num_magnitude_bins: Bins = 31

    _name = "trivial_augment"
    _torchvision = "TrivialAugmentWide"
    source = "Müller and Hutter 2021, arXiv:2103.10158"


@dataclass(frozen=True)
class AugMix(_Policy):
    """Mix each training image with `width` copies altered by short chains of random operations.

    The operations are the 13 of `RandAugment` without identity, as in torchvision's `AugMix`. As there, the paper's
    additional consistency loss is not included. Defaults are the paper's.

    Attributes:
        severity: largest magnitude of an operation, in tenths of its range. Integer from 1 to 10. Default 3.
        width: number of chains. Integer from 1 to 32. Default 3.
        depth: operations per chain. Integer from 1 to 32, or -1 for 1 to 3 at random. Default -1.
        alpha: parameter of the Beta distribution between image and mixture and of the Dirichlet distribution between
            the chains. From 0.01 to 100; larger values give more even weights. Default 1.

    Source: Hendrycks et al., "AugMix", 2020, arXiv:1912.02781.

    Example::

        >>> pipeline = pipeline.transform(AugMix(severity=3))
    """

    severity: Severity = 3
    width: Operations = 3
    depth: Depth = -1
    alpha: Annotated[float, Within("[0.01, 100]")] = 1.0

    _name = "aug_mix"
    _torchvision = "AugMix"
    source = "Hendrycks et al. 2020, arXiv:1912.02781"


@dataclass(frozen=True)
class ThreeAugment(_Policy):
    """Make each training image gray, solarize it or blur it, each as likely, and then jitter its colors.

    As in DeiT III's code: pixels from level 128 on are inverted, the Gaussian blur has a standard deviation of 0.1 to 2
    pixels, and brightness, contrast and saturation change in a random order. Its horizontal flip is that of
    `load`. No pixel moves, so masks, boxes and keypoints may be targets.

    Attributes:
        color_jitter: largest change of the factors of brightness, contrast and saturation from 1. Number in [0, 1].
            Default 0.3, as in the paper.

    Source: Touvron et al., "DeiT III: Revenge of the ViT", 2022, arXiv:2204.07118.

    Example::

        >>> pipeline = pipeline.transform(ThreeAugment())
    """

    color_jitter: Fraction = 0.3

    _name = "three_augment"
    source = "Touvron et al. 2022, arXiv:2204.07118"

    def image(self, image: Image) -> Any:
        return three_augment(self.color_jitter, image)
