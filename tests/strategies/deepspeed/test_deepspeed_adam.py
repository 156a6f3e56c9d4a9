"""Torch's fused Adam, with which ZeRO steps an optimizer that it offloads to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drivetrain.strategies.deepspeed.strategy import step_fused
from torch import nn
from torch.optim import SGD, Adam, AdamW

ADAMS: dict[str, Callable[[Any], Adam]] = {
    "AdamW": lambda p: AdamW(p, lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "Adam": lambda p: Adam(p, lr=3e-3, weight_decay=0.1),
    "decoupled Adam": lambda p: Adam(p, lr=3e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "AMSGrad": lambda p: AdamW(p, lr=3e-3, amsgrad=True),
    "groups": lambda p: AdamW([{"params": p[:1]}, {"params": p[1:], "maximize": True, "lr": 0.1}]),
    "tensor": lambda p: AdamW(p, lr=torch.tensor(0.1)),
}


class Mine(AdamW):
    """A custom subclass, whose step may be another."""


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in (7, 1001)]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("name", ADAMS)
@pytest.mark.parametrize("before", [0, 2])
def test_it_computes_the_same(name: str, before: int) -> None:
    """Also with the state that the other one has computed before."""
    plain, fused = ADAMS[name](weights()), ADAMS[name](weights())
    for number in range(before):
        step(plain, number)
        step(fused, number)
    step_fused(fused)
    for number in range(before, before + 10):
        for optimizer in (plain, fused):
            optimizer.param_groups[0]["lr"] *= 0.9
            step(optimizer, number)
    assert [group["fused"] for group in fused.param_groups] == [True] * len(fused.param_groups)
    for one, other in zip(plain.state.values(), fused.state.values(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    for one, other in zip(plain.param_groups, fused.param_groups, strict=True):
        torch.testing.assert_close(other["params"], one["params"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("factory", "kept"),
    [
        (lambda p: SGD(p, lr=0.1), None),
        (Mine, None),
        (lambda p: Adam(p, capturable=True), None),
        (lambda p: AdamW(p, differentiable=True), None),
        (lambda p: AdamW(p, foreach=True), None),
        (lambda p: AdamW(p, foreach=False), None),
        (lambda p: AdamW(p, fused=False), False),
        (lambda p: AdamW(p, fused=True), True),
    ],
)
def test_what_the_factory_selects_stays(factory: Callable[[Any], Any], kept: bool | None) -> None:
    optimizer = factory(weights())
    step_fused(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [kept]
