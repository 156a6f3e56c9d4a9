"""Averages use a few kernels for all tensors, with the same numbers as one operation per tensor."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from drivetrain.transforms import EMA, SWA, Lookahead, Transform
from drivetrain.transforms.common.averaging import Averages
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def net(layers: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)).to(dtypes[n % len(dtypes)])
        for n in range(layers)
    ]
    return nn.Sequential(*blocks)


def disturb(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
            else:
                tensor.add_(1)


class Operations(TorchDispatchMode):
    """Counts the operations that would launch kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("detach", "view", "alias"):
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "method", [EMA(half_life=2), Lookahead(1, decay=0.3), SWA(start=0.0, end=1.0)], ids=repr
)
def test_launches_do_not_grow_with_the_model(method: Transform) -> None:
    counts = []
    for layers in (1, 7):
        model = net(layers)
        session = method.session(model)
        session.after_step(0.1)  # SWA makes its copies
        with Operations() as operations:
            disturb_none = session.after_step(0.2)
        assert disturb_none is None
        counts.append(operations.counted)
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) <= 4, counts[0]


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.float32, torch.float64), (torch.float32, torch.bfloat16)], ids=str
)
def test_the_numbers_are_those_of_one_tensor_after_another(dtypes: tuple[torch.dtype, ...]) -> None:
    """Bit for bit, in the averages and in the model; counters and masks are copied."""
    model = net(4, dtypes)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    averages = Averages(model)
    expected = {
        name: value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
        if value.is_floating_point()
        else value.clone()
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    for step in range(3):
        disturb(model, step)
        averages.add(0.3)
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_floating_point() and name != "mask":
                expected[name].lerp_(value.detach().to(expected[name].dtype), 0.3)
            else:
                expected[name].copy_(value)
    found = averages.state_dict()
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    with averages.installed():
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name].to(value.dtype)), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name]), name
