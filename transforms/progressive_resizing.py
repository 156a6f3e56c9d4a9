"""ProgressiveResizing: small images first, full size at the end."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..common.errors import PlanError
from .base import BatchContext, Fraction, FractionAboveZero, Loop, Positive, Session, Transform
from .common.images import check_batch, resize
from .common.moments import least_share, session_at


@dataclass(frozen=True)
class ProgressiveResizing(Transform):
    """Train on images of growing size, in three phases: small, growing linearly, full size.

    A loader that resizes while decoding uses `size`, which saves decoding time too; for other loaders `batch` resizes
    the tensors, bilinear and antialiased. Use only one of the two: `batch` expects full-size images. (Composer
    documents bilinear but uses nearest-neighbor.) A loader with `crop="random"`, which does not resize, cuts smaller
    pieces out of its images, in their own resolution.

    Attributes:
        initial_scale: initial side as a fraction of the full side. Number in (0, 1]. Default 0.5, as in Composer.
        delay: fraction of training at the initial size. Number in [0, 1]. Default 0.5, as in Composer.
        finetune: final fraction at full size; with `delay`, at most 1. Number in [0, 1]. Default 0.2, as in Composer.
        size_increment: intermediate sizes are multiples of it, in pixels. Integer ≥ 1. Default 4, as in Composer.

    Source: Howard and Gugger, fastai's "Progressive Resizing", fastbook chapter 7, 2020.

    Example::

        >>> resizing = ProgressiveResizing(initial_scale=0.5, delay=0.5, finetune=0.2)
        >>> [resizing.size(224, progress) for progress in (0, 0.6, 1)]
        [112, 148, 224]
    """

    initial_scale: FractionAboveZero = 0.5
    delay: Fraction = 0.5
    finetune: Fraction = 0.2
    size_increment: Positive = 4

    kind = "batch"
    source = "Howard and Gugger 2020, fastbook chapter 7"
    keeps_samples = True
    changes_image_size = True
    tried_by_tune = "resolution"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay + self.finetune > 1 + 1e-9:  # 0.7 + 0.3 may be slightly above 1
            raise PlanError(
                f"ProgressiveResizing(delay={self.delay}, finetune={self.finetune}): together they exceed the full "
                "training. Pass two fractions with a sum of at most 1."
            )

    @property
    def depends_on_length(self) -> bool:
        return self.finetune < 1

    @property
    def turning_points(self) -> tuple[float, ...]:
        return self.delay, 1 - self.finetune

    def check_epochs(self, epochs: int, image_size: int | tuple[int, int]) -> None:
        if self.finetune and self.size(image_size, 1 - 0.5 / epochs) != image_size:
            least = least_share(epochs)
            earlier = f", and delay to at most {1 - least:g}" if self.delay > 1 - least + 1e-9 else ""
            raise PlanError(
                f"{self} sets one size per epoch, and with epochs={epochs} none would have full size. Train for more "
                f"epochs, or set finetune to at least {least:g}{earlier}."
            )

    def session(self, model: nn.Module) -> Session:  # noqa: ARG002
        return session_at(before_epoch=self._resize)

    def _resize(self, loop: Loop) -> None:
        size = self.size(loop.image_size, loop.progress_at(loop.epoch_start + loop.steps_per_epoch / 2))
        if size != loop.loader.settings.image_size:
            loop.loader.set_image_size(size)

    def size(self, image_size: int | tuple[int, int], progress: float) -> int | tuple[int, int]:
        """Return the side to train at, or height and width, in pixels, at `progress` (0 to 1).

        Grows from `image_size` times `initial_scale`, rounded to a multiple of `size_increment`, to `image_size`, even
        if that is not a multiple. Of two, the width does, and the height keeps the proportions.
        """
        if isinstance(image_size, tuple):
            return self._both(*image_size, progress)
        return self._side(image_size, progress)

    def _both(self, height: int, width: int, progress: float) -> tuple[int, int]:
        small = self._side(width, progress)
        return max(height * small // width, 1), small

    def _side(self, side: int, progress: float) -> int:
        # Slightly less than the fraction, which a progress of k/n may miss by the last bit.
        if progress >= 1 - self.finetune - 1e-9:
            return side
        ramp = max(1 - self.finetune - self.delay, 1e-9)
        risen = max(progress - self.delay, 0.0) / ramp
        scale = self.initial_scale + (1 - self.initial_scale) * risen
        steps = max(round(side * scale / self.size_increment), 1)
        return min(steps * self.size_increment, side)

    def batch(self, images: Tensor, targets: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Return images (B, 3, h, w) for `context.progress`, and the targets: w is `size` of W, h in proportion."""
        check_batch(self, images, targets)
        height, width = images.shape[-2:]
        return resize(images, *self._both(height, width, context.progress)), targets
