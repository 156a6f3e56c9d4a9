"""GPU checkpoints: bit-for-bit resuming on the GPU, and resuming to and from the CPU."""

from pathlib import Path
from typing import Any

import gpu_device
import pytest
import torch
from drivetrain import Pipeline
from drivetrain.pipeline import Checkpoints
from drivetrain.transforms import EMA, SWA
from gpu_device import Device
from pipeline_data import CLASSES, Toy, numbers
from torch import nn

pytestmark = [*gpu_device.MARKS, pytest.mark.usefixtures("exact")]
MIDDLE = "checkpoints/step-00000003"
"""Of the first of two epochs of four steps."""


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that give the same sums each time; without it, cuDNN may choose others."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def dropping_model() -> nn.Module:
    """Draws the device's random numbers in every step, and has BatchNorm's buffers."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(8 * 64, CLASSES),
    )  # fmt: skip


def still_model() -> nn.Module:
    """The same without what differs from device to device."""
    return nn.Sequential(*(layer for layer in dropping_model() if not isinstance(layer, nn.Dropout)))


def pipeline(toy: Toy, device: str, model: Any, **options: Any) -> Pipeline:
    made = toy.pipeline(model).optimize("adamw", lr=0.01, warmup=0.2)
    return made.distribute("single", device=device, **options)


def trained(made: Pipeline, out: Path | None, **more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    result = made.fit(epochs=2, progress=False, out=out, **more)
    return numbers(result), result.model.state_dict()


SAVES: Any = {"checkpoints": Checkpoints(every_steps=1, keep=1000)}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("transform", [None, EMA(half_life=3), SWA(start=0.3)], ids=repr)
def test_resumed_on_the_device_bit_for_bit(
    device: Device, toy: Toy, tmp_path: Path, precision: str, transform: Any
) -> None:
    made = pipeline(toy, device.name, dropping_model, precision=precision, clip_norm=1.0)
    if transform is not None:
        made = made.transform(transform)
    whole = trained(made, tmp_path / "whole", **SAVES)
    assert trained(made, None)[0] == whole[0]  # else nothing could be resumed bit for bit
    torch.manual_seed(99)  # of both devices: the checkpoint's own must count
    found = trained(made, None, resume=tmp_path / "whole" / MIDDLE)
    assert found[0] == whole[0]
    torch.testing.assert_close(found[1], whole[1], rtol=0, atol=0)


@pytest.mark.parametrize("to_device", [True, False])
def test_from_one_device_to_the_other(device: Device, toy: Toy, tmp_path: Path, to_device: bool) -> None:
    source, target = ("cpu", device.name) if to_device else (device.name, "cpu")
    whole = trained(pipeline(toy, source, still_model), tmp_path / "whole", **SAVES)
    found = trained(pipeline(toy, target, still_model), None, resume=tmp_path / "whole" / MIDDLE)
    assert found[0] == [pytest.approx(epoch, rel=1e-2, abs=1e-2) for epoch in whole[0]]
    torch.testing.assert_close(found[1], whole[1], rtol=2e-2, atol=2e-2)


def test_a_checkpoint_holds_tensors_that_need_no_device(device: Device, toy: Toy, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trained(pipeline(toy, device.name, dropping_model), tmp_path / "run", **SAVES)
    kept = [load_file(file) for file in (tmp_path / "run").rglob("*.safetensors")]
    assert len(kept) > 2
    assert {value.device.type for tensors in kept for value in tensors.values()} == {"cpu"}


@gpu_device.TWO
def test_dp_resumes_the_draws_of_all_its_devices(device: Device, toy: Toy, tmp_path: Path) -> None:
    made = toy.pipeline(dropping_model).optimize("adamw", lr=0.01).distribute("dp", device=device.name)
    whole = trained(made, tmp_path / "whole", **SAVES)
    torch.manual_seed(99)
    assert trained(made, None, resume=tmp_path / "whole" / MIDDLE)[0] == whole[0]
