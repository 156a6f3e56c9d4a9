"""`auto`: what it chooses, and why. test_parity.py covers training on ranks."""

from __future__ import annotations

import psutil
import pytest
import torch
from ddp_jobs import CASES
from drivetrain import PlanError, strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import Auto
from drivetrain.strategies.auto import COMFORTABLE, free_bytes
from drivetrain.transforms import GradientClipping, LayerFreezing
from parity_jobs import train
from pipeline_data import Toy
from torch import nn

NEED = 16 * 1000 * 1001
"""Bytes of AdamW for the model below."""


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(1000, 1000)


@pytest.mark.parametrize(
    ("devices", "times", "name", "words"),
    [
        (1, 100, "single", "there is one device"),
        (1, 0.01, "single", "there is one device"),
        (4, 1.01, "ddp", "each can hold all"),
        (4, 0.99, "fsdp", "each can hold its shard of 0.00 GiB, but not all"),
        (4, 0.26, "fsdp", "but not all"),
        (4, 0.24, "fsdp_cpu_offload", "not even a shard"),
    ],
)
def test_the_choice_follows_the_memory(devices: int, times: float, name: str, words: str) -> None:
    found, why = Auto("cpu")._choose(model(), devices, int(times * NEED / COMFORTABLE))
    assert found == name
    assert words in why
    assert "1.0 M parameters need 0.01 GiB with AdamW" in why


def test_memory_is_the_machines_divided_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = free_bytes(torch.device("cpu"), 8)
    assert found == pytest.approx(psutil.virtual_memory().available / 2, rel=0.2)


def test_choose_needs_no_ranks() -> None:
    name, why = Auto("cpu").choose(model(), 2)
    assert name == "ddp"
    assert "are free for each of 2 device(s)" in why


def test_alone_it_is_single() -> None:
    single, auto = train("single", CASES[0]), train("auto", CASES[0])
    assert auto.losses == single.losses


def test_it_checks_its_devices() -> None:
    with pytest.raises(StrategyError, match="'auto': devices=0 must be a positive integer"):
        strategies.get("auto", device="cpu").check(0)
    with pytest.raises(StrategyError, match="devices=0"):
        Auto("cpu").choose(model(), 0)


def test_a_plan_refuses_what_one_of_the_choices_cannot_do(toy: Toy) -> None:
    freezing = toy.pipeline().transform(LayerFreezing()).distribute("auto", devices=2)
    with pytest.raises(PlanError, match="'ddp_find_unused_parameters' or 'fsdp'"):
        freezing.plan()
    with pytest.raises(PlanError, match="'auto' might shard them"):
        toy.pipeline().transform(GradientClipping("adaptive")).distribute("auto", devices=2).plan()
