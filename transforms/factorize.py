"""Factorize: replace a wide convolution or linear layer by two narrow ones, using the singular value decomposition.

Shapes: O output and I input channels or features, R the rank. The surgery changes a module in place, so hooks
and sharing are preserved; its weight (O, I, ...) is replaced by two.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from .base import Kind, Report, State, Transform
from .common.checks import check_bool, check_count, check_size
from .common.surgery import Verdict, obstacle, operate, places, rename


def factorize(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two factors whose product is the best approximation of `weight` with that rank.

    Args:
        weight: (O, I, ...), floating-point.
        rank: R, from 1 to min(O, I · ...).

    Returns:
        (R, I, ...) and (O, R, 1, ...), of equal norm, with the dtype and device of `weight`.
    """
    matrix = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).flatten(1)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    root = values[:rank].sqrt()
    down = (root[:, None] * right[:rank]).reshape(rank, *weight.shape[1:])
    up = (left[:, :rank] * root).reshape(weight.shape[0], rank, *[1] * (weight.dim() - 2))
    return down.to(weight.dtype).contiguous(), up.to(weight.dtype).contiguous()


def multiply(down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the weight (O, I, ...) equivalent to the factors (R, I, ...) and (O, R, 1, ...)."""
    return (up.flatten(1) @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


class _Factorized(nn.Module):
    down: nn.Module
    up: nn.Module

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(input))  # type: ignore[no-any-return]

    # For code that reads a child's weight instead of calling it, as nn.TransformerEncoderLayer does.
    @property
    def weight(self) -> torch.Tensor:
        """(O, I, ...): the product, recomputed on each access."""
        return multiply(self.down.weight, self.up.weight)  # type: ignore[arg-type]

    @property
    def bias(self) -> torch.Tensor | None:
        """(O,), or None."""
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
    (truncated singular value decomposition), so that a pretrained model stays close to its function. Composer
    initialises the factors at random. Applying it again changes nothing; a layer without a bias gets none;
    padding mode, dtype, device and requires_grad are preserved.

    A module changes only if it is wide enough and the factors need fewer multiplications. Only plain `nn.Conv2d`
    and `nn.Linear` change. BlurPool, WeightStandardization and SqueezeExcite accept factorised layers but not
    the reverse, so they are applied after Factorize. Grouped convolutions, and those that share their weight
    with another module, are left unchanged.

    `name.weight` and `name.bias` become `name.down.weight`, `name.up.weight` and `name.up.bias`. `from_plain`
    factorises the plain weights; `to_plain` multiplies the factors, with the same output.

    Attributes:
        factorize_convs: whether to change convolutions. Default True.
        factorize_linears: whether to change linear layers. Default True.
        min_channels: convolutions with fewer input or output channels are left unchanged. Integer ≥ 0.
            Default 256, as in Composer.
        latent_channels: rank of a convolution: an integer ≥ 1, or a fraction in (0, 1) of the smaller of its
            input and output channels. Default 0.25, as in Composer.
        min_features: same as min_channels, for linear layers. Integer ≥ 0. Default 256, as in Composer.
        latent_features: rank of a linear layer, like latent_channels. Default 128, as in Composer.

    Raises:
        PlanError: at construction, if a value has the wrong type.

    Source: MosaicML Composer, method card "Factorize"; Denton et al. 2014, arXiv:1404.0736.

    Example::

        >>> report = Factorize(min_channels=512).apply(model)
        >>> len(report.changed)
        3
    """

    factorize_convs: bool = True
    factorize_linears: bool = True
    min_channels: int = 256
    latent_channels: int | float = 0.25
    min_features: int = 256
    latent_features: int | float = 128

    kind: ClassVar[Kind] = "surgery"
    tried_by_tune = "surgery"
    source: ClassVar[str] = "Composer's method card; Denton et al. 2014, arXiv:1404.0736"
    renames: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in ("factorize_convs", "factorize_linears"):
            check_bool(self, field)
        for field in ("min_channels", "min_features"):
            check_count(self, field)
        for field in ("latent_channels", "latent_features"):
            check_size(self, field)

    def apply(self, model: nn.Module) -> Report:
        """Change `model` in place. Modules already factorised are kept and noted in the report."""
        inside = {
            id(child)
            for module in model.modules()
            if isinstance(module, _Factorized)
            for child in (module.down, module.up)
        }
        owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))

        def judge(module: nn.Module) -> Verdict | str:
            if isinstance(module, _Factorized):
                return Verdict.DONE
            if id(module) in inside or not self._wants(module):
                return Verdict.IGNORE
            if any(owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False)):
                return "another module shares its weight"
            return self._obstacle(module) or Verdict.CHANGE

        looks_for = (
            f"Conv2d of at least {self.min_channels} channels and Linear of at least "
            f"{self.min_features} features"
        )
        return operate("Factorize", model, judge, self._change, looks_for)

    def from_plain(self, state: State, model: nn.Module) -> State:
        """Return the state with each changed module's plain weight as its two factors."""
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
        """Return the state with each changed module's factors as their product; the output is the same."""
        plain = dict(state)
        for place in places(model, _Factorized):
            if f"{place}down.weight" in plain:
                down, up = plain.pop(f"{place}down.weight"), plain.pop(f"{place}up.weight")
                plain[f"{place}weight"] = multiply(down, up)
            rename(plain, f"{place}up.bias", f"{place}bias")
        return plain

    def _wants(self, module: nn.Module) -> bool:
        return (self.factorize_convs and isinstance(module, nn.Conv2d)) or (
            self.factorize_linears and isinstance(module, nn.Linear)
        )

    def _obstacle(self, module: nn.Module) -> str | None:
        """Return why a candidate cannot change, or None."""
        conv = isinstance(module, nn.Conv2d)
        reason = obstacle(module, nn.Conv2d if conv else nn.Linear)
        if reason:
            return reason
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            return f"a convolution with {module.groups} groups"
        width, least = _width(module), self.min_channels if conv else self.min_features
        if width < least:
            return f"width {width}, below {'min_channels' if conv else 'min_features'}={least}"
        rank, best = self._rank(module), _largest_rank_that_saves(module)
        if rank > best:
            return f"rank {rank} saves no multiplications; use at most {best}"
        if not module.weight.is_meta and not module.weight.any():  # type: ignore[operator]
            return "its weight is 0, and factors of 0 get no gradient"
        return None

    def _rank(self, module: nn.Module) -> int:
        wanted = self.latent_channels if isinstance(module, nn.Conv2d) else self.latent_features
        return max(1, int(wanted * _width(module) if wanted < 1 else wanted))

    def _change(self, module: nn.Module) -> None:
        rank = self._rank(module)
        if isinstance(module, nn.Conv2d):
            _split_conv(module, rank)
        elif isinstance(module, nn.Linear):
            _split_linear(module, rank)


def _width(module: nn.Module) -> int:
    """Return the smaller of input and output channels or features."""
    if isinstance(module, nn.Conv2d):
        return min(module.in_channels, module.out_channels)
    assert isinstance(module, nn.Linear)
    return min(module.in_features, module.out_features)


def _largest_rank_that_saves(module: nn.Module) -> int:
    """Return the largest R with R · (fan-in + O) < fan-in · O."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    outputs, fan_in = weight.shape[0], weight[0].numel()
    return math.ceil(fan_in * outputs / (fan_in + outputs)) - 1


def _split_conv(conv: nn.Conv2d, rank: int) -> None:
    with torch.device("meta"):  # the weights come from the factors
        down = nn.Conv2d(
            conv.in_channels, rank, conv.kernel_size, conv.stride, conv.padding, conv.dilation,  # type: ignore[arg-type]
            bias=False, padding_mode=conv.padding_mode,
        )  # fmt: skip
        up = nn.Conv2d(rank, conv.out_channels, 1, bias=conv.bias is not None)
    _split(conv, down, up, FactorizedConv2d)


def _split_linear(linear: nn.Linear, rank: int) -> None:
    with torch.device("meta"):
        down = nn.Linear(linear.in_features, rank, bias=False)
        up = nn.Linear(rank, linear.out_features, bias=linear.bias is not None)
    _split(linear, down, up, FactorizedLinear)


def _split(whole: nn.Module, down: nn.Module, up: nn.Module, cls: type[_Factorized]) -> None:
    """Turn `whole`, a convolution or linear layer, into a `cls` with the children `down` and `up`."""
    weight, bias = whole.weight, whole.bias
    assert isinstance(weight, nn.Parameter)
    assert isinstance(down.weight, nn.Parameter)
    for child, value in zip((down, up), factorize(weight, down.weight.shape[0]), strict=True):
        child.weight = nn.Parameter(value, requires_grad=weight.requires_grad)
        child.train(whole.training)
    if bias is not None:
        up.bias = bias  # the same Parameter
    del whole.weight, whole.bias
    whole.__class__ = cls
    whole.add_module("down", down)
    whole.add_module("up", up)


__all__ = ["Factorize", "FactorizedConv2d", "FactorizedLinear", "factorize", "multiply"]
