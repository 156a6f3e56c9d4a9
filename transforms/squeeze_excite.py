"""SqueezeExcite: scale each convolution's output channels by a small network of their means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .base import Natural, Report, Size, State, Transform
from .blurpool import BlurConv2d
from .common.surgery import Classes, Verdict, change_class, children_of, judge_class, operate, places
from .factorize import FactorizedConv2d
from .weight_standardization import StandardizedBlurConv2d, StandardizedConv2d


class Gate(nn.Module):
    """Scale channels: mean over H and W → linear → ReLU → linear → sigmoid → times the input."""

    def __init__(self, channels: int, latent: int, **options: Any) -> None:
        super().__init__()
        self.down = nn.Linear(channels, latent, bias=False, **options)
        self.up = nn.Linear(latent, channels, bias=False, **options)

    def forward(self, input: Tensor) -> Tensor:
        weights: Tensor = self.up(self.down(input.mean((-2, -1))).relu()).sigmoid()
        return input * weights[..., None, None]


class _Gated(nn.Module):
    se: Gate

    def forward(self, input: Tensor) -> Tensor:
        return self.se(super().forward(input))  # type: ignore[no-any-return]


class GatedConv2d(_Gated, nn.Conv2d): ...


class GatedBlurConv2d(_Gated, BlurConv2d): ...


class GatedStandardizedConv2d(_Gated, StandardizedConv2d): ...


class GatedStandardizedBlurConv2d(_Gated, StandardizedBlurConv2d): ...


class GatedFactorizedConv2d(_Gated, FactorizedConv2d): ...


CLASSES: Classes = {
    nn.Conv2d: GatedConv2d,
    BlurConv2d: GatedBlurConv2d,
    StandardizedConv2d: GatedStandardizedConv2d,
    StandardizedBlurConv2d: GatedStandardizedBlurConv2d,
    FactorizedConv2d: GatedFactorizedConv2d,
}


@dataclass(frozen=True)
class SqueezeExcite(Transform):
    """Add a squeeze-and-excitation block to every convolution that is wide enough.

    Same modules and numbers as Composer's `apply_squeeze_excite`. A factorized convolution counts as one, with a block
    after its second factor. SqueezeExcite is therefore applied after Factorize, BlurPool and WeightStandardization,
    which would skip gated convolutions.

    The convolution's weights keep their names; `name.se.down.weight` and `name.se.up.weight` are new. They are
    initialized at random, as in the paper, with gates near 0.5: a pretrained model must be trained again. A plain model
    cannot express the blocks: `to_plain` keeps these entries, and a plain model loads the others with
    `load_state_dict(strict=False)`. `from_plain` adds the current ones.

    Attributes:
        latent_channels: hidden width, ≥ 1, or a fraction in (0, 1) of the output channels. Default 64, as in Composer.
        min_channels: convolutions with fewer input or output channels stay. Integer ≥ 0. Default 128, as in Composer.

    Source: Hu et al., "Squeeze-and-Excitation Networks", 2018, arXiv:1709.01507.

    Example::

        >>> report = SqueezeExcite(min_channels=256).apply(model)
        >>> len(report.changed)
        8
    """

    latent_channels: Size = 64
    min_channels: Natural = 128

    kind = "surgery"
    on_meta = True
    source = "Hu et al. 2018, arXiv:1709.01507"
    renames = True
    after = ("BlurPool", "Factorize", "WeightStandardization")

    def apply(self, model: nn.Module) -> Report:
        factors = children_of(model, FactorizedConv2d)

        def judge(module: nn.Module) -> Verdict | str:
            verdict = judge_class(module, CLASSES)
            if verdict is Verdict.DONE or not isinstance(module, nn.Conv2d | FactorizedConv2d):
                return verdict
            if id(module) in factors:
                return Verdict.IGNORE
            width = min(module.in_channels, module.out_channels)
            small = f"width {width}, below min_channels={self.min_channels}"
            return small if width < self.min_channels else verdict

        looks_for = f"Conv2d with at least {self.min_channels} input and output channels"
        return operate("SqueezeExcite", model, judge, self._change, looks_for)

    def from_plain(self, state: State, model: nn.Module) -> State:
        own = model.state_dict()
        new = [name for place in places(model, Gate) for name in own if name.startswith(place)]
        return {**{name: own[name] for name in new}, **state}

    def _change(self, module: nn.Module) -> None:
        assert isinstance(module, nn.Conv2d | FactorizedConv2d)
        latent, width = self.latent_channels, module.out_channels
        hidden, like = max(1, int(latent * width if latent < 1 else latent)), next(module.parameters())
        gate = Gate(width, hidden, device=like.device, dtype=like.dtype)
        change_class(module, CLASSES)
        module.add_module("se", gate.train(module.training))
