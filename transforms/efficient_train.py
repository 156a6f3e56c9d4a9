"""EfficientTrain: low frequencies and weak augmentation first, full images and strong augmentation at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..common.checks import is_number, is_whole
from ..common.errors import PlanError
from ..common.options.config import Kind
from ..common.transfer import to_device
from .base import BatchContext, Loop, Positive, Session, Transform
from .common.images import check_batch, keep_format
from .common.moments import session_at
from .policies import RandAugment


def _several(valid: Callable[[Any], bool], name: str) -> Kind:
    return Kind(lambda value: isinstance(value, tuple) and len(value) > 0 and all(map(valid, value)), name)


Sides = Annotated[tuple[int, ...], _several(lambda side: is_whole(side, 1), "a list of positive integers")]
Fractions = Annotated[
    tuple[float, ...], _several(lambda each: is_number(each, "(0, 1]"), "a list of fractions in (0, 1]")
]
_EDGE = 1e-9  # a progress of k/n may miss a fraction by the last bit


@dataclass(frozen=True)
class EfficientTrain(Transform):
    """Train on the low frequencies of each image first, and let `RandAugment` become stronger; EfficientTrain++.

    At bandwidth B, an image of side R becomes one of side B: the centered B × B crop of its discrete Fourier transform,
    transformed back, times B² / R²::

        small = real(ifft2(crop(fft2(image), B))) · B² / R²

    This keeps all frequencies below B / 2 exactly, and the mean. For even B, the crop has the frequencies -B/2 to
    B/2 - 1, and the imaginary part that its unpaired frequency -B/2 leaves is dropped, as in the authors' code; for odd
    B, it is symmetric. Sharp edges ring, so values may leave the range of the image's.

    The bandwidths follow each other at the fractions `compute` of the run's computation, which is taken as proportional
    to the pixels. So most steps are small: for images of 224 pixels, by default 48 % of the steps have 96 pixels, 34 %
    have 160, and 18 % all. A step costs 44 % of a full one on average: for the computation of E epochs, train for
    2.27 · E epochs, as the paper does. Its learning rate follows `compute_at(progress)`, too; to do the same, pass a
    function of it as `schedule`.

    `RandAugment`, if the pipeline has it, begins at magnitude 0 and rises linearly with the computation to its own
    magnitude: in each epoch, it is (magnitude + 1) · `compute_at(middle of the epoch)`, rounded down, as in the paper.

    The model must accept all sizes, which is checked before training: most CNNs do. timm's vision transformers need
    `dynamic_img_size=True`, and as `size_increment` a multiple of their patch; torchvision's accept one size only. With
    `compile`, the model is compiled twice: for the first bandwidth, and at the second one for all sizes.

    The loader crops and augments at full size, and the crop of the frequencies, two matrix products, is computed on the
    device of the batch, before all other batch transforms (the authors' later code resizes in the loader instead, with
    a Lanczos filter). It is not combined with `ProgressiveResizing`. Targets with pixels (masks, further fields) and
    several views would not follow, and are rejected. Evaluation uses full images.

    Attributes:
        bandwidths: sides of the images, in order; they rise, and the last one means the full side, whatever that
            is: of images of 112 pixels, the others are half as large. Default (96, 160, 224), as in the paper.
        compute: fraction of the computation at each bandwidth; the sum is 1. Default (0.2, 0.4, 0.4), as in the paper.
        size_increment: bandwidths below the full side are multiples of it, in pixels. Integer ≥ 1. Default 16, the
            patch of most vision transformers, which gives the paper's sizes. Use 4 for images of 32 pixels.

    Raises:
        PlanError: for bandwidths that do not rise, and fractions of the computation that do not match them.

    Source: Wang et al., "EfficientTrain++: Generalized Curriculum Learning for Efficient Visual Backbone Training",
    TPAMI 2024, arXiv:2405.08768; first in "EfficientTrain", ICCV 2023, arXiv:2211.09703.

    Example::

        >>> method = EfficientTrain()
        >>> [method.bandwidth(224, progress) for progress in (0, 0.6, 1)]
        [96, 160, 224]
        >>> pipeline = pipeline.transform(EfficientTrain(), RandAugment(magnitude=9))
    """

    bandwidths: Sides = (96, 160, 224)
    compute: Fractions = (0.2, 0.4, 0.4)
    size_increment: Positive = 16

    kind = "batch"
    source = "Wang et al. 2024, arXiv:2405.08768"
    keeps_samples = True
    changes_image_size = True
    tried_by_tune = "methods"
    targets = ("class indices", "labels", "values")
    excludes = ("ProgressiveResizing",)
    depends_on_length = True

    def __post_init__(self) -> None:
        for name in ("bandwidths", "compute"):  # lists, as recipes have them
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        super().__post_init__()
        sides = self.bandwidths
        if any(low >= high for low, high in pairwise(sides)):
            raise PlanError(f"EfficientTrain(bandwidths={sides}): they must rise. Sort them.")
        if len(self.compute) != len(sides) or abs(sum(self.compute) - 1) > _EDGE:
            raise PlanError(
                f"EfficientTrain(compute={self.compute}): pass a fraction for each of the {len(sides)} bandwidths, "
                "with a sum of 1."
            )

    @property
    def caution(self) -> str:
        shares = np.diff(self._ends, prepend=0.0)
        steps = ", ".join(
            f"{share:.0%} of the steps at {side / self.bandwidths[-1]:.2g} of the side"
            for share, side in zip(shares, self.bandwidths, strict=True)
        )
        rounded = f"; below 1, in multiples of {self.size_increment} pixels" * (self.size_increment > 1)
        return f"({steps}{rounded}; RandAugment's magnitude rises from 0)"

    @property
    def _ends(self) -> list[float]:
        """The fraction of the steps at which each bandwidth ends."""
        steps = [each / side**2 for each, side in zip(self.compute, self.bandwidths, strict=True)]
        return [end / sum(steps) for end in accumulate(steps)]

    @property
    def turning_points(self) -> tuple[float, ...]:
        return tuple(self._ends[:-1])

    def compute_at(self, progress: float) -> float:
        """Return the fraction of the computation, 0 to 1, that is done at a fraction `progress` of the steps."""
        return float(np.interp(progress, [0.0, *self._ends], [0.0, *accumulate(self.compute)]))

    def bandwidth(self, image_size: int | tuple[int, int], progress: float) -> int | tuple[int, int]:
        """Return the side, or height and width, in pixels, of images of `image_size` at `progress` (0 to 1)."""
        if isinstance(image_size, tuple):
            return self._side(image_size[0], progress), self._side(image_size[1], progress)
        return self._side(image_size, progress)

    def _side(self, side: int, progress: float) -> int:
        full = self.bandwidths[-1]
        stages = zip(self._ends, self.bandwidths, strict=True)
        own = next((own for end, own in stages if progress < end - _EDGE), full)
        steps = max(round(side * own / full / self.size_increment), 1)
        return side if own == full else min(steps * self.size_increment, side)

    def sizes(self, image_size: int | tuple[int, int]) -> tuple[int | tuple[int, int], ...]:
        return tuple(self.bandwidth(image_size, progress) for progress in (0.0, *self._ends[:-1]))

    def magnitude(self, largest: int, progress: float) -> int:
        """Return RandAugment's magnitude at `progress` (0 to 1), which rises from 0 to `largest`."""
        return min(int((largest + 1) * self.compute_at(progress)), largest)

    def batch(self, images: Tensor, targets: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, h, w) of `bandwidth(…, context.progress)`, and the targets. Computed in float32, or in
        float64 for float64; integers are rounded, and clamped to 0 to 255."""
        check_batch(self, images, targets)
        height, width = (self._side(side, context.progress) for side in images.shape[-2:])
        return low_frequencies(images, height, width), targets

    def session(self, model: nn.Module) -> Session:  # noqa: ARG002
        return session_at(before_epoch=self._set_magnitude)

    def _set_magnitude(self, loop: Loop) -> None:
        """Set the magnitude of the loader's RandAugment."""
        settings = getattr(loop.loader, "created_with", None)  # a custom loop may have another loader
        if settings is None or settings.policy is None or settings.policy["name"] != "rand_augment":
            return
        largest = settings.policy.get("magnitude", RandAugment.magnitude)
        middle = loop.progress_at(loop.epoch_start + loop.steps_per_epoch / 2)
        policy = {**settings.policy, "magnitude": self.magnitude(largest, middle)}
        if policy != loop.loader.settings.policy:
            loop.loader.set_policy(policy)


def low_frequencies(images: Tensor, height: int, width: int) -> Tensor:
    """Return images (B, C, height, width) with the lowest frequencies of `images` (B, C, H, W), of the same dtype and
    memory format; see `EfficientTrain`."""
    if images.shape[-2:] == (height, width):
        return images
    (count, channels, rows, columns), device = images.shape, images.device
    wide = torch.float64 if images.dtype == torch.float64 else torch.float32
    with torch.autocast(device.type, enabled=False):
        # Along the height first: of channels-last images, which loaders yield, it needs no copy.
        pixels = images.to(wide).permute(0, 2, 3, 1).reshape(count, rows, columns * channels)
        low = torch.bmm(_basis(height, rows, device, wide).T.expand(count, -1, -1), pixels)
        low = low.view(count, height + 1, columns, channels).mT @ _basis(width, columns, device, wide)
    low = low.transpose(1, 2)
    # The product of both axes' imaginary parts is real: it is that of the unpaired frequencies, whose sign alternates.
    small = low[..., :-1, :-1] - low[..., -1:, -1:] * _checkerboard(height, width, device, wide)
    if not images.is_floating_point():
        small = small.round().clamp(0, 255)
    return keep_format(small.to(images.dtype), images)


@lru_cache(maxsize=16)  # on the device: to copy it in each step would synchronize
def _basis(bandwidth: int, side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix (side, bandwidth + 1) that takes values along an axis to their lowest frequencies' real part.
    Its last column gives the imaginary part, with which only the frequency -bandwidth/2 is left, of the first value."""
    frequencies = np.arange(bandwidth) - bandwidth // 2
    values, samples = np.arange(bandwidth), np.arange(side)
    real = np.zeros((side, bandwidth))
    for frequency in frequencies:
        real += np.cos(2 * np.pi * frequency * (values / bandwidth - samples[:, None] / side))
    unpaired = np.sin(np.pi * bandwidth * samples / side) * (bandwidth % 2 == 0)
    return to_device(torch.from_numpy(np.column_stack([real, unpaired]) / side).to(dtype), device)


@lru_cache(maxsize=16)
def _checkerboard(height: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    signs = 1 - 2 * ((np.arange(height)[:, None] + np.arange(width)) % 2)
    return to_device(torch.from_numpy(signs).to(dtype), device)
