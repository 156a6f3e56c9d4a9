"""GyroDropout: dropout with a few fixed subnetworks. Shapes: B batch, F features (last, or channels (B, F, H, W))."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from ..common.errors import PlanError
from ..common.transfer import to_device
from .base import FractionBelowOne, Loop, Positive, Report, Session, Transform
from .common.surgery import Verdict, obstacle, operate

P = ParamSpec("P")


def outside_graphs(forward: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Keep a forward out of compiled graphs, like `torch.compiler.disable`, whose import takes a second."""

    @wraps(forward)
    def run(*arguments: P.args, **named: P.kwargs) -> Tensor:
        if torch.compiler.is_compiling():
            eager: Callable[P, Tensor] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
            return eager(*arguments, **named)
        return forward(*arguments, **named)

    return run


class GyroDropoutLayer(nn.Dropout):
    """Drop, in each row of a training batch, the features that one subnetwork lacks; neighboring rows share one."""

    subnetworks: int
    concurrent: int
    hold: int | None  # steps before the selection changes; None until the length of the training is known
    seed: int
    step: int = 0
    counts: bool = True  # each training forward as a step; in a run, its session counts
    masks: Tensor | None = None
    kept: tuple[Tensor, tuple[object, ...], Tensor] | None = None

    @outside_graphs
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        if self.hold is None:
            raise PlanError(
                "GyroDropout needs the length of the training. Pass total_steps=…, or call its begin(model, "
                "total_steps) before the first step (a Pipeline does so)."
            )
        if hasattr(input, "fake_mode"):  # only shapes pass through the model, and the draws read values
            return super().forward(input)
        features = input.shape[1 if input.dim() == 4 else -1]
        period, offset = divmod(self.step, self.hold)
        if offset == 0 or self.masks is None or self.masks.shape[1] != features:
            self.masks = to_device(self._select(period, features), input.device)
        self.step += self.counts
        return input * self._factors(self.masks, input)

    def _factors(self, masks: Tensor, input: Tensor) -> Tensor:
        """Return the factors, 0 or 1 / (1 - p), to broadcast; cached: the next step mostly has the same masks."""
        key = (len(input), input.dim(), input.dtype, input.device)
        if self.kept is None or self.kept[0] is not masks or self.kept[1] != key:
            rows = torch.arange(len(input), device=masks.device) * self.concurrent // max(1, len(input))
            factors = masks[rows].to(input) / (1 - self.p)
            between = [1] * (input.dim() - 2)
            head, features = factors.shape
            shape = (head, features, *between) if input.dim() == 4 else (head, *between, features)
            self.kept = (masks, key, factors.view(shape))
        return self.kept[2]

    def _select(self, period: int, features: int) -> Tensor:
        """Return (concurrent, F), True where a feature is kept: subnetworks drawn with replacement."""
        generator = torch.Generator().manual_seed(self.seed + self.subnetworks + period)
        chosen = torch.randint(self.subnetworks, (self.concurrent,), generator=generator)
        # Rebuilt from their seeds: storing all takes subnetworks × F bytes per layer.
        seeds = (torch.Generator().manual_seed(self.seed + int(index)) for index in chosen)
        return torch.stack([torch.rand(features, generator=seed) for seed in seeds]) > self.p

    def set_length(self, total_steps: int) -> None:
        self.step, self.masks, self.kept = 0, None, None
        self.hold = max(1, total_steps // self.subnetworks * self.concurrent)

    def extra_repr(self) -> str:
        return f"p={self.p}, subnetworks={self.subnetworks}, concurrent={self.concurrent}, hold={self.hold}"


@dataclass(frozen=True)
class GyroDropout(Transform):
    """Replace the random masks of dropout layers by a few preselected ones that are kept for many steps.

    The method and the period are Composer's, which supports (B, F) and batches divisible by tau, and fails in runs
    shorter than sigma steps. Here any batch size and any shape of two or more dimensions work: in tokens (B, N, F) a
    subnetwork drops the same features of every token, in images (B, F, H, W) the same channels everywhere.

    Steps are counted in Python, so the layer runs outside a compiled graph. In a Pipeline's run they are those of the
    optimizer, also if a step has several forwards; without its session, also in Lightning, each training forward
    counts. The count is not in the state dict: a Pipeline's checkpoints save it separately. In a custom loop save each
    layer's `step`, or a resumed run restarts with the first period. Every rank has the same subnetworks if the ranks
    have the same seed when the transform is applied.

    It is applied after PatchDropout, which changes the dropout before a vision transformer's first block, and would
    leave one of another class alone; that one stays an ordinary dropout.

    Attributes:
        p: fraction of the features to drop, replacing the layer's own. Number in [0, 1). Default 0.5, as in Composer.
        sigma: number of preselected subnetworks. Integer ≥ 1. Default 256, as in Composer.
        tau: number of subnetworks that share a batch. Integer ≥ 1. Default 16, as in Composer.
        total_steps: optimizer steps of the full run. Integer ≥ 1. A selection is kept for total_steps // sigma · tau
            steps, at least one. Default None: a pipeline sets it; in a custom loop pass it here or to `begin`.

    Source: Lee et al., "GyroDropout: Maximizing Ensemble Effect in Neural Network Training", MLSys 2022.

    Example::

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        >>> GyroDropout(total_steps=1000).apply(model).changed
        ('1',)
    """

    p: FractionBelowOne = 0.5
    sigma: Positive = 256
    tau: Positive = 16
    total_steps: Positive | None = None

    kind = "surgery"
    on_meta = True
    source = "Lee et al., MLSys 2022"
    compile_safe = False
    after = ("PatchDropout",)
    counts_forwards = True
    follows_loop = False  # without its session, forwards count

    @property
    def depends_on_length(self) -> bool:
        return self.total_steps is None

    def apply(self, model: nn.Module) -> Report:
        # Of weights (B, K, N, N) of K heads. Fused attention reads its p, and does not call it.
        attention = {id(module.attn_drop) for module in model.modules() if hasattr(module, "attn_drop")}
        return operate("GyroDropout", model, partial(_judge, attention), self._change, "Dropout with p above 0")

    def begin(self, model: nn.Module, total_steps: int) -> None:
        for module in model.modules():
            if isinstance(module, GyroDropoutLayer) and self.total_steps is None:
                module.set_length(total_steps)

    def session(self, model: nn.Module) -> Session:
        return _Steps(model)

    def _change(self, module: nn.Module) -> None:
        module.__class__ = GyroDropoutLayer
        assert isinstance(module, GyroDropoutLayer)
        module.p, module.subnetworks, module.concurrent = self.p, self.sigma, self.tau
        module.hold = None
        if self.total_steps is not None:
            module.set_length(self.total_steps)
        module.seed = int(torch.randint(2**62, (), device="cpu"))  # also where tensors are made on the meta device


class _Steps(Session):
    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: m for name, m in model.named_modules() if isinstance(m, GyroDropoutLayer)}
        for layer in self._layers.values():
            layer.step, layer.masks, layer.counts = 0, None, False

    def after_step(self, progress: float) -> None:  # noqa: ARG002
        for layer in self._layers.values():
            layer.step += 1

    def on_step_end(self, loop: Loop) -> None:
        """Also of a skipped step."""
        for layer in self._layers.values():
            layer.step = loop.step

    def finish(self) -> None:
        for layer in self._layers.values():
            layer.counts = True

    def state_dict(self) -> dict[str, Any]:
        return {name: layer.step for name, layer in self._layers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, layer in self._layers.items():
            layer.step, layer.masks = state[name], None  # the masks depend on the count


def _judge(attention: Set[int], module: nn.Module) -> Verdict | str:
    if isinstance(module, GyroDropoutLayer):
        return Verdict.DONE
    if not isinstance(module, nn.Dropout):
        return Verdict.IGNORE
    if module.p == 0:
        return "p=0 has no effect"
    if id(module) in attention:
        return "it drops attention weights, which have no features"
    return obstacle(module, nn.Dropout) or Verdict.CHANGE
