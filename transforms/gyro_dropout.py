"""GyroDropout: dropout that trains a few fixed subnetworks, each for many steps.

Shapes: B batch, F features: the last dimension, or the channels of images (B, F, H, W).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ClassVar, ParamSpec

import torch
from torch import nn

from ..errors import PlanError
from ..transfer import to_device
from .base import Kind, Report, Transform
from .common.checks import check_count, check_fraction
from .common.surgery import Verdict, obstacle, operate

P = ParamSpec("P")


def outside_graphs(forward: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Keep a forward out of compiled graphs, as `torch.compiler.disable` does, which takes a second to import."""

    @wraps(forward)
    def run(*arguments: P.args, **named: P.kwargs) -> torch.Tensor:
        if torch.compiler.is_compiling():
            eager: Callable[P, torch.Tensor] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
            return eager(*arguments, **named)
        return forward(*arguments, **named)

    return run


class GyroDropoutLayer(nn.Dropout):
    """Drops, in each row of a training batch, the features that one of `concurrent` subnetworks lacks.

    Attributes:
        p: share of the features that a subnetwork lacks.
        subnetworks: how many there are in all.
        concurrent: how many of them share a batch; neighbouring rows have the same one.
        hold: for how many steps; None: not known yet, and needed to train.
        seed: the subnetworks and their order follow from it.
        step: training batches seen.
    """

    subnetworks: int
    concurrent: int
    hold: int | None
    seed: int
    step: int = 0
    masks: torch.Tensor | None = None
    kept: tuple[torch.Tensor, tuple[object, ...], torch.Tensor] | None = None

    @outside_graphs
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return input
        if self.hold is None:
            raise PlanError(
                "GyroDropout does not know how long the training is, and outside a pipeline nobody tells it. Give "
                "total_steps=…, or call its begin(model, total_steps) before the first step."
            )
        channels = input.dim() == 4
        features = input.shape[1] if channels else input.shape[-1]
        period, offset = divmod(self.step, self.hold)
        if offset == 0 or self.masks is None or self.masks.shape[1] != features:
            self.masks = to_device(self._select(period, features), input.device)
        self.step += 1
        return input * self._factors(self.masks, input)

    def _factors(self, masks: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """What the input is multiplied by, 0 or 1 / (1 - p), in a shape that goes with its own; kept for the next
        step, whose masks mostly are the same."""
        key = (len(input), input.dim(), input.dtype, input.device)
        if self.kept is None or self.kept[0] is not masks or self.kept[1] != key:
            rows = torch.arange(len(input), device=masks.device) * self.concurrent // max(1, len(input))
            factors = masks[rows].to(input) / (1 - self.p)
            shape = [1] * (input.dim() - 2)
            head, features = factors.shape
            places = (head, features, *shape) if input.dim() == 4 else (head, *shape, features)
            self.kept = (masks, key, factors.view(places))
        return self.kept[2]

    def _select(self, period: int, features: int) -> torch.Tensor:
        """(concurrent, F), true where a feature is kept: subnetworks drawn with replacement."""
        generator = torch.Generator().manual_seed(self.seed + self.subnetworks + period)
        chosen = torch.randint(self.subnetworks, (self.concurrent,), generator=generator)
        return torch.stack([self._subnetwork(int(index), features) for index in chosen])

    def _subnetwork(self, index: int, features: int) -> torch.Tensor:
        """(F,): made anew from its seed, because all of them would take subnetworks × F bytes a layer."""
        return torch.rand(features, generator=torch.Generator().manual_seed(self.seed + index)) > self.p

    def set_length(self, total_steps: int) -> None:
        """Begins a training of so many steps, and divides it into periods."""
        self.step, self.masks, self.kept = 0, None, None
        self.hold = max(1, total_steps // self.subnetworks * self.concurrent)

    def extra_repr(self) -> str:
        return f"p={self.p}, subnetworks={self.subnetworks}, concurrent={self.concurrent}, hold={self.hold}"


@dataclass(frozen=True)
class GyroDropout(Transform):
    """Replaces the random masks of dropout layers by a few preselected ones that stay for many steps.

    The method and the period are Composer's, which works for (B, F) and batches that tau divides, and
    fails in runs of fewer than sigma steps. Here any batch and any shape of two or more dimensions work;
    in tokens (B, N, F) a subnetwork drops the same features of every token, in images (B, F, H, W) the
    same channels everywhere. A layer with p = 0 does nothing and is left alone.

    Steps are counted in Python, so the layer stands outside a compiled graph. The count is not in the
    state dict: a Pipeline's checkpoints save it beside; in a loop of your own save `step` of each layer, else a
    resumed run begins with the first period again. Every rank has the same subnetworks if
    the ranks have the same seed when this is applied.

    Attributes:
        p: share of the features that are dropped, in place of the layer's own. Number in [0, 1).
            Default 0.5, as in Composer.
        sigma: preselected subnetworks. Count ≥ 1. Default 256, as in Composer.
        tau: subnetworks that share a batch. Count ≥ 1. Default 16, as in Composer.
        total_steps: optimizer steps of the whole run. Count ≥ 1. A selection stays for
            total_steps // sigma · tau steps, at least one. Default None: a pipeline tells its own, as
            Composer's trainer does; in a loop of your own give it here or to `begin`.

    Raises:
        PlanError: at construction, if a value cannot be used; in training, if the length is not known.

    Source: Lee et al., "GyroDropout: Maximizing Ensemble Effect in Neural Network Training", MLSys 2022.
    """

    p: float = 0.5
    sigma: int = 256
    tau: int = 16
    total_steps: int | None = None

    kind: ClassVar[Kind] = "surgery"
    source: ClassVar[str] = "Lee et al., MLSys 2022"
    compile_safe: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fraction(self, "p")
        for field in ("sigma", "tau") if self.total_steps is None else ("sigma", "tau", "total_steps"):
            check_count(self, field, least=1)

    @property
    def depends_on_length(self) -> bool:
        """Unless `total_steps` says how long the training is."""
        return self.total_steps is None

    def apply(self, model: nn.Module) -> Report:
        """Changes `model` in place. Layers that were changed before stay, with a note."""
        return operate("GyroDropout", model, _judge, self._change, "Dropout with p above 0")

    def begin(self, model: nn.Module, total_steps: int) -> None:
        """Tells the layers how long the training is, unless `total_steps` does."""
        for module in model.modules():
            if isinstance(module, GyroDropoutLayer) and self.total_steps is None:
                module.set_length(total_steps)

    def _change(self, module: nn.Module) -> None:
        module.__class__ = GyroDropoutLayer
        assert isinstance(module, GyroDropoutLayer)
        module.p, module.subnetworks, module.concurrent = self.p, self.sigma, self.tau
        module.hold = None
        if self.total_steps is not None:
            module.set_length(self.total_steps)
        module.seed = int(torch.randint(2**62, ()))


def _judge(module: nn.Module) -> Verdict | str:
    if isinstance(module, GyroDropoutLayer):
        return Verdict.DONE
    if not isinstance(module, nn.Dropout):
        return Verdict.IGNORE
    if module.p == 0:
        return "p=0: it does nothing"
    return obstacle(module, nn.Dropout) or Verdict.CHANGE


__all__ = ["GyroDropout", "GyroDropoutLayer"]
