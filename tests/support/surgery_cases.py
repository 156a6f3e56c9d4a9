"""Each surgery with its test models, and the number of modules that it changes in each."""

from collections.abc import Callable, Collection

import pytest
import surgery_models as m
import torch
from drivetrain import transforms as t
from torch import nn

FACTORIZE = t.Factorize(min_channels=16, min_features=16, latent_features=0.25)
EXCITE = t.SqueezeExcite(latent_channels=0.25, min_channels=16)
GYRO = t.GyroDropout(p=0.2, sigma=8, tau=4, total_steps=40)
GHOST = t.GhostBatchNorm(2)

Factory = Callable[[], nn.Module]
CASES: dict[str, tuple[t.Transform, Factory, int]] = {
    f"{type(transform).__name__}-{factory.__name__}": (transform, factory, count)
    for transform, factory, count in [
        (t.BlurPool(), m.resnet, 5), (t.BlurPool(), m.bottlenecks, 2), (t.BlurPool(blur_first=False), m.convnext, 1),
        (EXCITE, m.resnet, 8), (EXCITE, m.convnext, 4), (EXCITE, m.timm_resnet, 14),
        (EXCITE, m.Mixed, 1),
        (GHOST, m.resnet, 9), (GHOST, m.timm_resnet, 15),
        (t.WeightStandardization(), m.resnet, 9), (t.WeightStandardization(), m.convnext, 5),
        (t.WeightStandardization(), m.timm_vit, 1), (t.WeightStandardization(), m.Mixed, 2),
        (FACTORIZE, m.resnet, 8), (FACTORIZE, m.convnext, 7), (FACTORIZE, m.vit, 4),
        (FACTORIZE, m.timm_vit, 8), (FACTORIZE, m.Mixed, 2),
        (t.StochasticDepth(), m.resnet, 3), (t.StochasticDepth("sample"), m.bottlenecks, 2),
        (t.StochasticDepth(), m.convnext, 3), (t.StochasticDepth("sample"), m.vit, 2),
        (t.StochasticDepth(), m.timm_resnet, 4), (t.StochasticDepth(), m.timm_convnext, 4),
        (t.StochasticDepth("sample"), m.timm_vit, 2),
        (GYRO, m.Mixed, 1), (GYRO, m.vit, 7),
        (t.LowPrecisionLayerNorm(), m.vit, 5), (t.LowPrecisionLayerNorm(), m.convnext, 6),
        (t.LowPrecisionLayerNorm(), m.timm_vit, 5), (t.LowPrecisionLayerNorm(), m.timm_convnext, 9),
        (t.LowPrecisionGroupNorm(), m.Mixed, 1),
        (t.ALiBi(), m.vit, 2), (t.ALiBi(), m.timm_vit, 2),
        (t.GatedLinearUnits(), m.vit, 2), (t.GatedLinearUnits(), m.timm_vit, 2),
        (t.GatedLinearUnits(), m.timm_convnext, 4),
        (t.PatchDropout(), m.vit, 1), (t.PatchDropout(), m.timm_vit, 1),
    ]
}  # fmt: skip
cases = pytest.mark.parametrize(("transform", "factory", "count"), CASES.values(), ids=CASES)
_FIRST = {type(transform): name for name, (transform, *_) in reversed(CASES.items())}


def first_cases(but: Collection[type[t.Transform]] = ()) -> pytest.MarkDecorator:
    """The same, for tests that take long: one model of each surgery in `make test`, the others, and those of the
    surgeries `but`, in `make test-all`."""
    quick = [name for kind, name in _FIRST.items() if kind not in but]
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in CASES}
    values = [pytest.param(*case, id=name, marks=marks[name]) for name, case in CASES.items()]
    return pytest.mark.parametrize(("transform", "factory", "count"), values)


cases_at_length = first_cases()


def made(factory: Factory) -> nn.Module:
    torch.manual_seed(0)
    return factory()


def same_numbers(model: nn.Module, other: nn.Module, rtol: float = 0, atol: float = 0) -> None:
    torch.testing.assert_close(model.eval()(m.images()), other.eval()(m.images()), rtol=rtol, atol=atol)
