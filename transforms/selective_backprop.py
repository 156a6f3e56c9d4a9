"""SelectiveBackprop: gradients only of the images that are hardest just now."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from ..errors import DataError, PlanError
from ..transfer import to_device
from .base import BatchContext, Kind, Loss, Transform
from .common.checks import check_count, check_range
from .common.images import check_batch, resize
from .common.tensors import buffers_kept
from .label_smoothing import SmoothedLoss


@dataclass(frozen=True)
class SelectiveBackprop(Transform):
    """Keeps a share of each batch, drawn in favour of high losses, found by a forward without gradients.

    With the losses in order, the image at quantile q is drawn with a weight of q^(1 / keep - 1), without
    repetition, as in Composer. Where `BatchContext.model` is an `nn.Module`, its buffers come back as they
    were, so that BatchNorm's statistics do not count an image twice (in Composer they do).

    It stands after ProgressiveResizing: images are ranked at the size they are trained at, and cheaper.

    Attributes:
        start: share of the training after which it begins. Number in [0, 1]. Default 0.5, as in Composer.
        end: share of the training before which it ends; above `start`. Number in [0, 1]. Default 0.9, as in
            Composer.
        keep: share of a batch that is kept, at least one image. Number in (0, 1). Default 0.5, as in
            Composer.
        scale_factor: side of the images in the selecting forward, as a share of theirs. Number in (0, 1].
            Default 1.0, as in Composer.
        interrupt: every so many steps one takes its whole batch; 0: none does. Whole number ≥ 0 except 1,
            with which all would. Default 2, as in Composer.

    Raises:
        PlanError: at construction, if a value is out of range; by `batch`, if the context lacks the model,
            the loss or the step, or the loss cannot give one value per image.

    Source: Jiang et al., "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019,
    arXiv:1910.00762.
    """

    start: float = 0.5
    end: float = 0.9
    keep: float = 0.5
    scale_factor: float = 1.0
    interrupt: int = 2

    kind: ClassVar[Kind] = "batch"
    source: ClassVar[str] = "Jiang et al. 2019, arXiv:1910.00762"
    after: ClassVar[tuple[str, ...]] = ("ProgressiveResizing",)

    def __post_init__(self) -> None:
        check_range(self, "start", "[0, 1]")
        check_range(self, "end", "[0, 1]")
        check_range(self, "keep", "(0, 1)")
        check_range(self, "scale_factor", "(0, 1]")
        check_count(self, "interrupt")
        if self.end <= self.start:
            raise PlanError(
                f"SelectiveBackprop(start={self.start}, end={self.end}): nothing lies between; "
                "give an end above the start."
            )
        if self.interrupt == 1:
            raise PlanError(
                "SelectiveBackprop(interrupt=1): every step would take its whole batch; give 2 or more, "
                "0 for no such step, or leave SelectiveBackprop out."
            )

    @property
    def depends_on_length(self) -> bool:
        """Unless it selects from the start to the end."""
        return self.start > 0 or self.end < 1

    def selects(self, progress: float, step: int) -> bool:
        """Whether a batch is cut down at this progress (0 to 1), with `step` optimizer steps done."""
        whole = self.interrupt > 0 and (step + 1) % self.interrupt == 0
        return self.start <= progress < self.end and not whole

    def batch(
        self, images: torch.Tensor, targets: torch.Tensor, context: BatchContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The kept part of the batch, or all of it where `selects` says no.

        Args:
            images: (B, 3, H, W); dtype and memory format stay.
            targets: (B,) class indices or (B, C) probabilities.
            context: `model`, `loss` and `step` must be there. The forward runs under the autocast and on
                the device that the caller set.

        Returns:
            int(keep · B) rows of images and targets.
        """
        if context.model is None or context.loss is None or context.step is None:
            raise PlanError(
                "SelectiveBackprop needs the model, the loss and the step to choose images; "
                "give BatchContext(model=…, loss=…, step=…)."
            )
        loss = unreduced(context.loss)
        if not self.selects(context.progress, context.step):
            return images, targets
        check_batch(self, images, targets)
        losses = self._losses(images, targets, context.model, loss)
        kept = choose(losses, self.keep, context.generator)
        return images[kept], targets[kept]

    @torch.no_grad()
    def _losses(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        model: Callable[[torch.Tensor], torch.Tensor],
        loss: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """One loss for each image, (B,)."""
        height, width = (max(round(side * self.scale_factor), 1) for side in images.shape[-2:])
        with buffers_kept(model) if isinstance(model, nn.Module) else nullcontext():
            logits = model(resize(images, height, width))
        losses = loss(logits.float(), targets)
        if losses.dim() < 1 or len(losses) != len(images):
            raise DataError(
                f"SelectiveBackprop: the loss of {len(images)} images has the shape {tuple(losses.shape)}; "
                "it needs one value per image. A loss that drops rows (target -100) cannot be used."
            )
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def choose(losses: torch.Tensor, keep: float, generator: torch.Generator) -> torch.Tensor:
    """Indices of int(keep · B) images, at least one, on the device of `losses` (B,)."""
    count = len(losses)
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ranks = (quantiles ** (1 / keep - 1)).multinomial(max(int(keep * count), 1), generator=generator)
    return losses.argsort()[to_device(ranks, losses.device)]


def unreduced(loss: Loss) -> Callable[..., torch.Tensor]:
    """The same loss, giving one value per image in place of their mean.

    Known are modules with an attribute `reduction`, functions and `functools.partial` with an argument
    `reduction` (all of torch's losses), and LabelSmoothing of any of these.

    Raises:
        PlanError: if the loss is none of these.
    """
    if isinstance(loss, SmoothedLoss):
        return dataclasses.replace(loss, base=unreduced(loss.base))
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        each: Any = copy.copy(loss)
        each.reduction = "none"
        return cast(Callable[..., torch.Tensor], each)
    if not isinstance(loss, nn.Module) and _takes_reduction(loss):
        return functools.partial(cast(Callable[..., Any], loss), reduction="none")
    raise PlanError(
        f"SelectiveBackprop needs a loss for each image, and {loss!r} gives only one for all: use a loss with "
        "an argument reduction='none', such as F.cross_entropy, or leave SelectiveBackprop out."
    )


def _takes_reduction(loss: Callable[..., Any]) -> bool:
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a callable of C, which shows no signature
        return False


__all__ = ["SelectiveBackprop", "choose", "unreduced"]
