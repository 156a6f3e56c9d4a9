"""Factorize: replace a wide convolution or linear layer by two narrow ones, using the singular value decomposition.
Shapes: O output and I input channels or features, R the rank."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .base import Natural, Report, Size, State, Transform
from .common.surgery import Verdict, children_of, computed, obstacle, operate, places, rename


def factorize(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the two factors whose product is the best approximation of `weight` (O, I, ...) with that rank R: (R, I,
    ...) and (O, R, 1, ...), of equal norm, with the same dtype."""
    matrix = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).flatten(1)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    root = values[:rank].sqrt()
    down = (root[:, None] * right[:rank]).reshape(rank, *weight.shape[1:])
    up = (left[:, :rank] * root).reshape(weight.shape[0], rank, *[1] * (weight.dim() - 2))
    return down.to(weight.dtype).contiguous(), up.to(weight.dtype).contiguous()


def multiply(down: Tensor, up: Tensor) -> Tensor:
    """Return the weight (O, I, ...) equivalent to the factors (R, I, ...) and (O, R, 1, ...)."""
    return (up.flatten(1) @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


class _Factorized(nn.Module):
    down: nn.Module
    up: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.up(self.down(input))  # type: ignore[no-any-return]

    # For code that reads a child's weight instead of calling it, as nn.TransformerEncoderLayer does; not stored.
    @property
    def weight(self) -> Tensor:
        return multiply(self.down.weight, self.up.weight)  # type: ignore[arg-type]

    @property
    def bias(self) -> Tensor | None:
        return self.up.bias  # type: ignore[return-value]


class FactorizedConv2d(_Factorized):
    """`down`, the convolution with R output channels, then `up`, a 1×1 one from R to O."""

    in_channels: int
    out_channels: int


class FactorizedLinear(_Factorized):
    """`down`, from I to R features without a bias, then `up`, from R to O."""

    in_features: int
    out_features: int


@dataclass(frozen=True)
class Factorize(Transform):
    """Replace the weight W of wide convolutions and linear layers by a product of two smaller ones.

    The modules and ranks are those of Composer's `Factorize`, but the factors are the best approximation of W
    (truncated singular value decomposition), so that a pretrained model stays close to its function; Composer
    initializes them at random. Padding mode, dtype, device and requires_grad are preserved.

    A module changes only if it is wide enough and the factors need fewer multiplications. Only plain `nn.Conv2d` and
    `nn.Linear` change: BlurPool, WeightStandardization and SqueezeExcite accept factorized layers but not the reverse,
    so they are applied later. Grouped convolutions, and shared weights, are left unchanged.

    `name.weight` and `name.bias` become `name.down.weight`, `name.up.weight` and `name.up.bias`. `from_plain`
    factorizes the plain weights; `to_plain` multiplies the factors, with the same output.

    Attributes:
        factorize_convs: whether to change convolutions. Default True.
        factorize_linears: whether to change linear layers. Default True.
        min_channels: convolutions with fewer input or output channels stay. Integer ≥ 0. Default 256, as in Composer.
        latent_channels: rank of a convolution: an integer ≥ 1, or a fraction in (0, 1) of the smaller of its input and
            output channels. Default 0.25, as in Composer.
        min_features: same as min_channels, for linear layers. Integer ≥ 0. Default 256, as in Composer.
        latent_features: rank of a linear layer, like latent_channels. Default 128, as in Composer.

    Source: MosaicML Composer, method card "Factorize"; Denton et al. 2014, arXiv:1404.0736.

    Example::

        >>> report = Factorize(min_channels=512).apply(model)
        >>> len(report.changed)
        3
    """

    factorize_convs: bool = True
    factorize_linears: bool = True
    min_channels: Natural = 256
    latent_channels: Size = 0.25
    min_features: Natural = 256
    latent_features: Size = 128

    kind = "surgery"
    tried_by_tune = "surgery"
    source = "Composer's method card; Denton et al. 2014, arXiv:1404.0736"
    renames = True

    def apply(self, model: nn.Module) -> Report:
        factors = children_of(model, _Factorized)
        wanted: tuple[type[nn.Module], ...] = (nn.Conv2d,) * self.factorize_convs
        wanted += (nn.Linear,) * self.factorize_linears
        owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))

        def judge(module: nn.Module) -> Verdict | str:
            if isinstance(module, _Factorized):
                return Verdict.DONE
            if id(module) in factors or not isinstance(module, wanted):
                return Verdict.IGNORE
            if any(owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False)):
                return "another module shares its weight"
            return self._obstacle(module) or Verdict.CHANGE

        convs = f"Conv2d of at least {self.min_channels} channels"
        looks_for = f"{convs} and Linear of at least {self.min_features} features"
        return operate("Factorize", model, judge, self._change, looks_for)

    def from_plain(self, state: State, model: nn.Module) -> State:
        changed = dict(state)
        modules = dict(model.named_modules(remove_duplicate=False))
        for place in places(model, _Factorized):
            if f"{place}weight" in changed:
                rank = modules[place[:-1]].get_parameter("down.weight").shape[0]
                down, up = factorize(changed.pop(f"{place}weight"), rank)
                changed[f"{place}down.weight"], changed[f"{place}up.weight"] = down, up
            rename(changed, f"{place}bias", f"{place}up.bias")
        return changed

    def to_plain(self, state: State, model: nn.Module) -> State:
        plain = dict(state)
        for place in places(model, _Factorized):
            if f"{place}down.weight" in plain:
                down, up = plain.pop(f"{place}down.weight"), plain.pop(f"{place}up.weight")
                plain[f"{place}weight"] = multiply(down, up)
            rename(plain, f"{place}up.bias", f"{place}bias")
        return plain

    def _obstacle(self, module: nn.Module) -> str | None:
        conv = isinstance(module, nn.Conv2d)
        if reason := obstacle(module, nn.Conv2d if conv else nn.Linear) or computed(module):
            return reason
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            return f"a convolution with {module.groups} groups"
        weight = module.get_parameter("weight")
        option = "min_channels" if conv else "min_features"
        width, least = min(weight.shape[:2]), getattr(self, option)
        if width < least:
            return f"width {width}, below {option}={least}"
        outputs, fan_in = weight.shape[0], weight[0].numel()
        # The largest R with R · (fan_in + outputs) < fan_in · outputs.
        best = math.ceil(fan_in * outputs / (fan_in + outputs)) - 1
        rank = self._rank(module)
        if rank > best:
            return f"rank {rank} saves no multiplications; use at most {best}"
        if not weight.is_meta and not weight.any():
            return "its weight is 0, and factors of 0 get no gradient"
        return None

    def _rank(self, module: nn.Module) -> int:
        wanted = self.latent_channels if isinstance(module, nn.Conv2d) else self.latent_features
        width = min(module.get_parameter("weight").shape[:2])
        return max(1, int(wanted * width if wanted < 1 else wanted))

    def _change(self, module: nn.Module) -> None:
        down: nn.Module
        up: nn.Module
        rank = self._rank(module)
        with torch.device("meta"):  # the weights come from the factors
            if isinstance(module, nn.Conv2d):
                down = nn.Conv2d(
                    module.in_channels, rank, module.kernel_size, module.stride, module.padding,  # type: ignore[arg-type]
                    module.dilation, bias=False, padding_mode=module.padding_mode,  # type: ignore[arg-type]
                )  # fmt: skip
                up = nn.Conv2d(rank, module.out_channels, 1, bias=module.bias is not None)
            else:
                assert isinstance(module, nn.Linear)
                down = nn.Linear(module.in_features, rank, bias=False)
                up = nn.Linear(rank, module.out_features, bias=module.bias is not None)
        weight, bias = module.weight, module.bias
        for child, value in zip((down, up), factorize(weight, rank), strict=True):
            child.weight = nn.Parameter(value, requires_grad=weight.requires_grad)
            child.train(module.training)
        if bias is not None:
            up.bias = bias  # the same Parameter
        del module.weight, module.bias
        module.__class__ = FactorizedConv2d if isinstance(module, nn.Conv2d) else FactorizedLinear  # type: ignore[assignment]
        module.add_module("down", down)
        module.add_module("up", up)
