"""SelectiveBackprop: train only on the currently hardest images."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import DataError, PlanError
from ..common.model_state import buffers_kept
from ..common.transfer import to_device
from .base import BatchContext, Fraction, FractionAboveZero, Natural, ProperFraction, Transform
from .common.images import check_batch, height_width, resize
from .common.losses import unreduced


@dataclass(frozen=True)
class SelectiveBackprop(Transform):
    """Keep a fraction of each batch, drawn in favor of high losses from a forward without gradients.

    With the losses sorted, the image at quantile q is drawn with weight q^(1 / keep - 1), without replacement, as in
    Composer. If `BatchContext.model` is an `nn.Module`, its buffers are restored, so that BatchNorm's statistics do not
    count an image twice (in Composer they do). The loss must be able to return one value per image.
    It is applied after ProgressiveResizing and EfficientTrain, so that images are ranked at their training size, which
    is also cheaper.

    Attributes:
        start: fraction of training after which it begins. Number in [0, 1]. Default 0.5, as in Composer.
        end: fraction of training before which it ends; above `start`. Number in [0, 1]. Default 0.9, as in Composer.
        keep: fraction of a batch to keep, at least one image. Number in (0, 1). Default 0.5, as in Composer.
        scale_factor: relative image side in the selecting forward. Number in (0, 1]. Default 1.0, as in Composer.
        interrupt: every `interrupt`-th step uses all images; 0: none. Integer ≥ 0, not 1. Default 2, as in Composer.

    Source: Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019, arXiv:1910.00762.

    Example::

        >>> context = BatchContext(
        ...     torch.Generator(), progress=0.6, classes=2, model=model, loss=nn.functional.cross_entropy, step=0
        ... )
        >>> kept, targets = SelectiveBackprop(keep=0.5).batch(images, labels, context)
        >>> len(kept)
        4
    """

    start: Fraction = 0.5
    end: Fraction = 0.9
    keep: ProperFraction = 0.5
    scale_factor: FractionAboveZero = 1.0
    interrupt: Natural = 2

    kind = "batch"
    source = "Jiang et al. 2019, arXiv:1910.00762"
    targets = ("class indices",)
    selects_samples = True
    after = ("ProgressiveResizing", "EfficientTrain")
    tried_by_tune = "surgery"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end <= self.start:
            raise PlanError(
                f"SelectiveBackprop(start={self.start}, end={self.end}) covers no part of the training. Set end above "
                "start."
            )
        if self.interrupt == 1:
            raise PlanError(
                "SelectiveBackprop(interrupt=1) would use the full batch in every step. Set it to 2 or more, to 0 for "
                "no such step, or remove SelectiveBackprop."
            )

    @property
    def depends_on_length(self) -> bool:
        return self.start > 0 or self.end < 1

    def selects(self, progress: float, step: int) -> bool:
        """Return whether to select from the batch at `progress` (0 to 1), after `step` optimizer steps."""
        whole = self.interrupt > 0 and (step + 1) % self.interrupt == 0
        return self.start <= progress < self.end and not whole

    def sizes(self, image_size: int | tuple[int, int]) -> tuple[int | tuple[int, int], ...]:
        if self.scale_factor == 1:
            return (image_size,)
        height, width = map(self._scaled, height_width(image_size))
        return image_size, (height, width)

    def _scaled(self, side: int) -> int:
        return max(round(side * self.scale_factor), 1)

    def batch(self, images: Tensor, targets: Tensor, context: BatchContext) -> tuple[Tensor, Tensor]:
        """Return int(keep · B) selected rows of images and targets, or the full batch if `selects` is false.

        The forward uses the caller's autocast mode and device; `context` must have `model`, `loss` and `step`.
        """
        if context.model is None or context.loss is None or context.step is None:
            raise PlanError(
                "SelectiveBackprop needs the model, the loss and the step to select images. Pass "
                "BatchContext(model=…, loss=…, step=…)."
            )
        loss = unreduced(context.loss)
        if loss is None:
            raise PlanError(
                f"SelectiveBackprop needs a loss for each image, but {context.loss!r} returns one per batch. Use a "
                "loss with an argument reduction='none', such as F.cross_entropy, or remove SelectiveBackprop."
            )
        if not self.selects(context.progress, context.step):
            return images, targets
        check_batch(self, images, targets)
        losses = self._losses(images, targets, context.model, loss)
        kept = choose(losses, self.keep, context.generator)
        return images[kept], targets[kept]

    @torch.no_grad()
    def _losses(
        self, images: Tensor, targets: Tensor, model: Callable[[Tensor], Any], loss: Callable[..., Tensor]
    ) -> Tensor:
        height, width = map(self._scaled, images.shape[-2:])
        with buffers_kept(model) if isinstance(model, nn.Module) else nullcontext():
            logits = model(resize(images, height, width))
        if not isinstance(logits, Tensor):
            raise DataError(
                f"SelectiveBackprop needs a model that returns one tensor of logits, not a {type(logits).__name__}."
            )
        losses = loss(logits.float(), targets)
        if losses.dim() < 1 or len(losses) != len(images):
            raise DataError(
                f"SelectiveBackprop needs one loss per image, but the loss of {len(images)} images has shape "
                f"{tuple(losses.shape)}. Use a loss that does not drop rows (target -100)."
            )
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def choose(losses: Tensor, keep: float, generator: torch.Generator) -> Tensor:
    """Return the indices of int(keep · B) images, at least one, for losses (B,)."""
    count = len(losses)
    quantiles = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    ranks = (quantiles ** (1 / keep - 1)).multinomial(max(int(keep * count), 1), generator=generator)
    return losses.argsort()[to_device(ranks, losses.device)]
