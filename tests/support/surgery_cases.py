"""Each surgery with its test models, and the number of modules that it changes in each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from drivetrain.transforms import (
    ALiBi,
    Factorize,
    GatedLinearUnits,
    GhostBatchNorm,
    GyroDropout,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    SqueezeExcite,
    StochasticDepth,
    Transform,
    WeightStandardization,
)
from surgery_models import (
    Mixed,
    bottlenecks,
    convnext,
    images,
    resnet,
    timm_convnext,
    timm_resnet,
    timm_vit,
    vit,
)
from torch import nn

FACTORIZE = Factorize(min_channels=16, min_features=16, latent_features=0.25)
EXCITE = SqueezeExcite(latent_channels=0.25, min_channels=16)
GYRO = GyroDropout(p=0.2, sigma=8, tau=4, total_steps=40)
GHOST = GhostBatchNorm(2)

CASES: dict[str, tuple[Transform, Callable[[], nn.Module], int]] = {
    f"{type(transform).__name__}-{factory.__name__}": (transform, factory, count)
    for transform, factory, count in [
        (EXCITE, resnet, 8), (EXCITE, convnext, 4), (EXCITE, timm_resnet, 14),
        (EXCITE, Mixed, 1),
        (GHOST, resnet, 9), (GHOST, timm_resnet, 15),
        (WeightStandardization(), resnet, 9), (WeightStandardization(), convnext, 5),
        (WeightStandardization(), timm_vit, 1), (WeightStandardization(), Mixed, 2),
        (FACTORIZE, resnet, 8), (FACTORIZE, convnext, 7), (FACTORIZE, vit, 4),
        (FACTORIZE, timm_vit, 8), (FACTORIZE, Mixed, 2),
        (StochasticDepth(), resnet, 3), (StochasticDepth("sample"), bottlenecks, 2),
        (StochasticDepth(), convnext, 3), (StochasticDepth("sample"), vit, 2),
        (StochasticDepth(), timm_resnet, 4), (StochasticDepth(), timm_convnext, 4),
        (StochasticDepth("sample"), timm_vit, 2),
        (GYRO, Mixed, 1), (GYRO, vit, 7),
        (LowPrecisionLayerNorm(), vit, 5), (LowPrecisionLayerNorm(), convnext, 6),
        (LowPrecisionLayerNorm(), timm_vit, 5), (LowPrecisionLayerNorm(), timm_convnext, 9),
        (LowPrecisionGroupNorm(), Mixed, 1),
        (ALiBi(), vit, 2), (ALiBi(), timm_vit, 2),
        (GatedLinearUnits(), vit, 2), (GatedLinearUnits(), timm_vit, 2),
        (GatedLinearUnits(), timm_convnext, 4),
    ]
}  # fmt: skip
cases = pytest.mark.parametrize(("transform", "factory", "count"), CASES.values(), ids=CASES)
_FIRST = {type(transform): name for name, (transform, *_) in reversed(CASES.items())}
cases_at_length = pytest.mark.parametrize(
    ("transform", "factory", "count"),
    [
        pytest.param(*case, id=name, marks=[] if name in _FIRST.values() else [pytest.mark.slow])
        for name, case in CASES.items()
    ],
)
"""The same, for tests that take long: one model of each surgery in `make test`, the others in `make test-all`."""


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory()


def same_numbers(model: nn.Module, other: nn.Module, rtol: float = 0, atol: float = 0) -> None:
    torch.testing.assert_close(model.eval()(images()), other.eval()(images()), rtol=rtol, atol=atol)
