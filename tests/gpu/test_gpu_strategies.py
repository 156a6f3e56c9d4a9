"""Strategies on GPUs: NCCL on one rank, and on two ranks with two devices, compared with one device."""

from typing import Any

import gpu_device
import pytest
import torch
from drivetrain.strategies import launch
from gpu_device import Device, agree, fitted, train_all
from pipeline_data import Toy, batch_norm_model

pytestmark = [*gpu_device.MARKS, pytest.mark.timeout(280)]
NAMES = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "fairscale_oss"]
CLOSE = {"fp32": {"rtol": 1e-3, "atol": 1e-4}, "bf16": {"rtol": 6e-2, "atol": 6e-3}}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=gpu_device.TWO)])
def test_ranks_in_a_process_group(device: Device, ranks: int) -> None:
    """Every rank of every strategy against one device, which trains in this process."""
    results: list[Any] = launch(train_all, NAMES, device.name, devices=ranks, timeout=240)
    alone = train_all(["single"], device.name)
    for one in results:
        assert one.keys() == {f"{name} {precision}" for name in NAMES for precision in CLOSE}
        for name, found in one.items():
            precision = name.split()[1]
            expected = alone[f"single {precision}"]
            assert found.device == device.name, name
            assert found.ranks == len(results) == ranks, name
            assert found.bytes > 0, f"{name} did nothing on the GPU"
            assert "nccl" in found.backend or not device.real, name
            assert found.losses == pytest.approx(expected.losses, rel=CLOSE[precision]["rtol"]), name
            state = {key: value.float() for key, value in found.state.items()}
            torch.testing.assert_close(state, expected.state, **CLOSE[precision])


@gpu_device.TWO
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_pipeline_on_two_devices_agrees_with_one(device: Device, toy: Toy, strategy: str) -> None:
    agree(fitted(toy, None, strategy, devices=2), fitted(toy, device=device.name), rel=1e-2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_pipeline_on_one_rank_agrees_with_single(device: Device, toy: Toy, strategy: str) -> None:
    """Outside a launch: there is nothing to wrap, and the device is the GPU all the same."""
    ranked = fitted(toy, batch_norm_model, strategy, device=device.name)
    agree(ranked, fitted(toy, batch_norm_model, device=device.name), rel=1e-3)
