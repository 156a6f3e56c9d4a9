"""GPU optimizers: Muon's iterations in bf16, and a run with it that resumes."""

from pathlib import Path
from typing import Any

import gpu_device
import pytest
import torch
from drivetrain.pipeline.optim.muon import Muon
from gpu_device import Device
from pipeline_data import Toy, batch_norm_model, numbers

pytestmark = gpu_device.MARKS
SHAPES = [(64, 128), (128, 64), (64, 128), (96, 96)]


def stepped(kind: Any, device: Device, **options: Any) -> list[torch.Tensor]:
    """Matrices after three steps."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device.name)) for shape in SHAPES
    ]
    optimizer = kind(weights, lr=0.02, momentum=0.9, weight_decay=0.1, **options)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(device.name)
        optimizer.step()
    device.holds(*weights, *(state["momentum_buffer"] for state in optimizer.state.values()))
    return [weight.detach().cpu() for weight in weights]


def test_muon_has_torchs_numbers(device: Device) -> None:
    """Batched products round to bf16 elsewhere: an update of 0.02 differs by bf16's last digits."""
    expected = stepped(torch.optim.Muon, device)
    found = stepped(Muon, device, **({} if device.real else {"precision": "bf16"}))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    plain = stepped(Muon, device, precision="fp32")
    torch.testing.assert_close(plain, expected, rtol=0, atol=2e-3)
    assert not all(map(torch.equal, plain, found)), "on CUDA, bf16 is the default"


@pytest.mark.parametrize("optimizer", ["muon", torch.optim.NAdam])
def test_a_run_resumes(device: Device, toy: Toy, tmp_path: Path, optimizer: Any) -> None:
    pipeline = toy.pipeline(batch_norm_model).optimize(optimizer, lr=0.01, schedule="constant")
    pipeline = pipeline.distribute("single", device=device.name)
    whole = pipeline.fit(epochs=2, progress=False)
    pipeline.fit(epochs=1, progress=False, out=tmp_path)
    again = pipeline.fit(epochs=2, progress=False, out=tmp_path, resume="auto")
    expected = [pytest.approx(epoch, abs=1e-4) for epoch in numbers(whole)]
    assert numbers(again) == expected
