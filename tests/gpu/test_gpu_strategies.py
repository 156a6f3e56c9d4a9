"""Strategies on GPUs: NCCL on one rank, and on two ranks with two devices, compared with one device."""

from typing import Any

import gpu_device
import pytest
import torch
from drivetrain.strategies import launch
from gpu_device import Device
from pipeline_data import Toy, batch_norm_model, numbers

pytestmark = [*gpu_device.MARKS, pytest.mark.timeout(280)]
NAMES = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "fairscale_oss"]
PRECISIONS = ("fp32", "bf16")
CLOSE = {"fp32": {"rtol": 1e-3, "atol": 1e-4}, "bf16": {"rtol": 6e-2, "atol": 6e-3}}


def check(
    results: list[dict[str, gpu_device.Found]], alone: dict[str, gpu_device.Found], device: Device
) -> None:
    """Every rank of every strategy against one device, which trained in this process."""
    assert [set(one) for one in results] == [{f"{name} {p}" for name in NAMES for p in PRECISIONS}] * len(
        results
    )
    for one in results:
        for name, found in one.items():
            precision = name.split()[1]
            expected = alone[f"single {precision}"]
            assert found.device == device.name, name
            assert found.ranks == len(results), name
            assert found.bytes > 0, f"{name} did nothing on the GPU"
            if device.real:
                assert "nccl" in found.backend, name
            assert found.losses == pytest.approx(
                expected.losses, rel=6e-2 if precision == "bf16" else 1e-3
            ), name
            torch.testing.assert_close(
                {key: value.float() for key, value in found.state.items()}, expected.state, **CLOSE[precision],
                msg=lambda text, name=name: f"{name}: {text}",
            )  # fmt: skip


def alone(device: Device) -> dict[str, gpu_device.Found]:
    return gpu_device.train_all(["single"], device.name)


def test_one_rank_in_a_process_group(device: Device) -> None:
    results: list[dict[str, Any]] = launch(gpu_device.train_all, NAMES, device.name, devices=1, timeout=240)
    check(results, alone(device), device)


@gpu_device.TWO
def test_two_ranks_on_two_devices(device: Device) -> None:
    results: list[dict[str, Any]] = launch(gpu_device.train_all, NAMES, device.name, devices=2, timeout=240)
    check(results, alone(device), device)


@gpu_device.TWO
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_pipeline_on_two_devices_agrees_with_one(device: Device, toy: Toy, strategy: str) -> None:
    pair = toy.pipeline().distribute(strategy, devices=2).fit(epochs=2, progress=False)
    one = toy.pipeline().distribute("single", device=device.name).fit(epochs=2, progress=False)
    for found, expected in zip(numbers(pair), numbers(one), strict=True):
        assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_pipeline_on_one_rank_agrees_with_single(device: Device, toy: Toy, strategy: str) -> None:
    """Outside a launch: there is nothing to wrap, and the device is the GPU all the same."""
    ranked = toy.pipeline(batch_norm_model).distribute(strategy, device=device.name)
    single = toy.pipeline(batch_norm_model).distribute("single", device=device.name)
    for found, expected in zip(
        numbers(ranked.fit(epochs=2, progress=False)),
        numbers(single.fit(epochs=2, progress=False)),
        strict=True,
    ):
        assert found == pytest.approx(expected, rel=1e-3)
