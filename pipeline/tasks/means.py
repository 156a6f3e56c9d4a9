"""Mean losses as a numerator over a denominator, which are summed over microbatches, ranks and batches."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...common.errors import DataError, PlanError
from ...transforms.binary_cross_entropy import binary_cross_entropy
from ...transforms.common.losses import unreduced
from ...transforms.label_smoothing import IGNORED, SmoothedLoss
from .nests import labels_of, map_tensors

LossFunction = Callable[[Any, torch.Tensor], torch.Tensor]
"""Maps outputs and targets to the mean loss of the batch, a scalar."""

Count = torch.Tensor | float
"""A denominator: a number if only the number of targets determines it, otherwise a scalar on their device."""


def samples(targets: Any) -> Count:
    return len(labels_of(targets))


@dataclass(frozen=True)
class Mean:
    loss: LossFunction
    # What the mean divides by, from the targets that the loss receives.
    denominator: Callable[[torch.Tensor], Count] = samples
    # The numerator, also where the denominator is 0; None: it is the mean times the denominator.
    total: LossFunction | None = None
    # Whether `denominator` is declared or the loss is one of torch's; otherwise the number of samples is an assumption.
    known: bool = True
    # The numerator's terms by sample, `(B,)`; None: they are not known.
    each: LossFunction | None = None

    @property
    def unreduced(self) -> LossFunction | None:
        """The loss with a value for each sample, also if it declares its denominator; None without `reduction`."""
        return _each(self.loss, summed=False)

    def of_samples(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return each sample's term of the numerator, `(B,)`."""
        if self.each is None:
            raise PlanError(f"The loss {self.loss!r:.80} {NOT_PER_SAMPLE}")
        return self.each(outputs, targets)

    def numerator(self, outputs: Any, targets: torch.Tensor, count: Count) -> torch.Tensor:
        """0 with zero gradients if `count`, the denominator, is 0."""
        if self.total is not None:
            return self.total(outputs, targets)
        if isinstance(count, torch.Tensor):
            map_tensors(partial(_zero_gradient_without, count), outputs)
            return torch.where(count > 0, self.loss(outputs, targets) * count, 0.0)
        total = self.loss(outputs, targets) * count
        if count:
            return total
        nothing = total.new_zeros((), dtype=torch.bool)  # on the device of the outputs
        map_tensors(partial(_zero_gradient_without, nothing), outputs)
        return torch.where(nothing, total, 0.0)


NOT_PER_SAMPLE = (
    "returns one value per batch, not one per sample. Use one of torch's losses, or a function that takes "
    "reduction='none'."
)


def ignored_by(loss: LossFunction) -> int | None:
    """Return the class index that one of torch's losses ignores; None of any other."""
    function, options = _parts(loss)
    usual = next((index for known, index in CLASS_LOSSES if known is function), None)
    return None if usual is None else int(options.get("ignore_index", usual))


def mean_of(loss: LossFunction, *, checked: bool = False) -> Mean:
    """Return a loss as a mean: torch's denominators are known, another declares `denominator`, a function of the
    targets, or has the mean over the samples. `checked`: no class index is -100, so unweighted losses need no look at
    the targets."""
    own = getattr(loss, "as_mean", None)
    if own is not None:
        mean: Mean = own()
        return mean
    if isinstance(loss, SmoothedLoss):
        return _of_smoothed(loss, checked=checked)
    if loss is binary_cross_entropy:
        return Mean(loss, samples if checked else _Classes(), _total_binary, each=_each(loss, summed=True))
    declared = getattr(loss, "denominator", None)
    if declared is not None:
        return Mean(loss, declared)
    function, options = _parts(loss)
    if (ignored := ignored_by(loss)) is None:
        known = getattr(function, "__module__", None) in _UNWEIGHTED
        return Mean(loss, known=known, each=_each(loss, summed=reduction_of(loss) == "batchmean"))
    classes = _Classes(options.get("weight"), ignored)
    plain = checked and classes.weight is None and classes.ignored < 0
    return Mean(loss, samples if plain else classes, _summed(loss), each=_each(loss, summed=True))


@dataclass(frozen=True)
class Adapted:
    base: LossFunction
    adapt: Callable[[torch.Tensor], torch.Tensor]
    outputs: Callable[[Any], Any]

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return self.base(self.outputs(outputs), self.adapt(targets))

    def as_mean(self) -> Mean:
        base = mean_of(self.base)
        total, each = (
            None if part is None else Adapted(part, self.adapt, self.outputs) for part in (base.total, base.each)
        )
        return Mean(self, lambda targets: base.denominator(self.adapt(targets)), total, base.known, each)


@dataclass(frozen=True)
class _Each:
    """A loss without reduction; of several values per sample, their sum or mean."""

    loss: Callable[..., torch.Tensor]
    summed: bool

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        values = self.loss(outputs, targets)
        if not values.dim() or len(values) != len(targets):
            raise DataError(
                f"The loss of {len(targets)} samples has shape {tuple(values.shape)} with reduction='none'. Use one "
                "that returns a value for each, also for an ignored target."
            )
        if values.dim() == 1:
            return values
        return values.flatten(1).sum(1) if self.summed else values.flatten(1).mean(1)


def _each(loss: Any, *, summed: bool) -> LossFunction | None:
    values = unreduced(loss)
    return None if values is None else _Each(values, summed)


def reduction_of(loss: object) -> str:
    _, options = _parts(loss)
    return str(options.get("reduction", "mean"))


@dataclass(frozen=True)
class _Classes:
    """Torch's denominator: of class indices the sum of their weights, except ignored ones; of probabilities `(B, C, …)`
    their number without C, also with weights."""

    weight: torch.Tensor | None = None
    ignored: int = IGNORED

    def __call__(self, targets: torch.Tensor) -> Count:
        if targets.is_floating_point():
            return targets.numel() / max(targets.shape[1], 1)
        counts = targets != self.ignored
        if self.weight is None:
            return counts.sum()
        return (self.weight[targets.long().where(counts, 0)] * counts).sum()


CLASS_LOSSES: list[tuple[Any, int]] = [
    (kind, IGNORED) for kind in (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)
]
"""The losses whose mean may be weighted by class, with the class index that they ignore by default. They take
`reduction="sum"`."""
_UNWEIGHTED = ("torch.nn.functional", "torch.nn.modules.loss")
"""Where torch's losses are defined. All others divide by the number of elements or samples, also with weights."""


def _parts(loss: object) -> tuple[Any, dict[str, Any]]:
    """Return what identifies a loss (a module's class, a function), and its options."""
    if isinstance(loss, partial):
        return (None if loss.args else loss.func), dict(loss.keywords)
    if isinstance(loss, nn.Module):
        names = ("weight", "ignore_index", "reduction")
        return type(loss), {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    return loss, {}


def _summed(loss: Any) -> LossFunction:
    if isinstance(loss, nn.Module):
        summed: Any = copy.copy(loss)
        summed.reduction = "sum"
        return summed  # type: ignore[no-any-return]
    return partial(loss, reduction="sum")


def _total_binary(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return binary_cross_entropy(outputs, targets, reduction="none").sum()


def _of_smoothed(loss: SmoothedLoss, *, checked: bool) -> Mean:
    """The mean over the rows that are not ignored, unless the base declares its own denominator."""
    base = mean_of(loss.base, checked=checked)
    plain = checked or base.denominator is not samples
    summed = base.total is not None or reduction_of(loss.base) == "batchmean"
    each = None if base.each is None else _each(loss, summed=summed)
    return Mean(loss, base.denominator if plain else _Classes(), known=base.known, each=each)


def _zero_gradient_without(count: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """That of a mean over nothing would be NaN."""
    if outputs.requires_grad:
        outputs.register_hook(lambda gradient: gradient.where(count > 0, 0.0))  # type: ignore[no-untyped-call]
    return outputs
