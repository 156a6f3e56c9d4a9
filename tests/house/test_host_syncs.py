"""The tests' own instruments: `host_syncs`, forked ranks, and the trainings of `make same`."""

import os
from contextlib import ExitStack

import pytest
import torch
from drivetrain.common.options.config import options_of
from drivetrain.loaders.options import LoaderOptions
from drivetrain.pipeline.optim.optimizers import OPTIMIZERS
from drivetrain.pipeline.tasks import TASKS
from drivetrain.strategies import launch
from drivetrain.strategies.registry import STRATEGIES
from drivetrain.transforms import TRANSFORMS
from host_syncs import HostSyncs, SimulatedCuda
from places import load_script
from same_cases import CASES


def test_reads_are_seen_and_the_optimizers_counters_are_not() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    with HostSyncs() as none:
        (weight * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert none.found == []
    with HostSyncs() as syncs:
        weight.sum().item()
        weight.detach().tolist()
        if (weight > 0).all():
            weight.detach()[weight.detach() > 0]
    names = [line.split()[0] for line in syncs.found]
    assert names[0] == "_local_scalar_dense"
    assert "index" in names
    assert len(names) >= 4
    assert all("test_host_syncs.py" in line for line in syncs.found)


def test_a_simulated_gpu() -> None:
    with SimulatedCuda() as device:
        images = torch.zeros(4, 3, device="cuda")
        draw = int(torch.randint(2, 3, ()))  # of the host, with a value
        order = torch.randperm(4).pin_memory()
        assert draw == 2
        mixed = images * 0.5 + images.roll(draw, 0) * torch.rand(()).item()
        assert device.found == []
        assert mixed.device.type == "cuda"
        assert mixed[order.to("cuda", non_blocking=True)].shape == (4, 3)
        assert device.found == []
        order.to("cuda")
        torch.tensor([0.5, 0.5], device="cuda")
        images.cpu()
        assert len(device.found) == 3, device.found
        images.sum().item()
        images.tolist()
        assert len(device.found) == 5, device.found


@pytest.mark.slow
@pytest.mark.process
def test_a_process_with_many_open_files() -> None:
    """The answer's number is among those that `rank_server.become` uses itself."""
    with ExitStack() as files:
        number = 0
        while number < 199:
            number = os.open(os.devnull, os.O_RDONLY)
            files.callback(os.close, number)
        assert launch(os.getpid, devices=1, device="cpu", timeout=60) != [os.getpid()]


ELSEWHERE = {"auto", "deepspeed.strategy"}
"""Strategies' modules: one chooses another, one takes minutes to compile."""


def test_every_part_has_a_training() -> None:
    cases = CASES.values()
    transforms = {type(transform).__name__ for case in cases for transform in case.transforms}
    assert TRANSFORMS.keys() - transforms == {"SeqLengthWarmup"}  # for text
    names = {case.distribute.get("strategy", "single") for case in cases}
    assert "zero_redundancy" in names  # of the module of ddp
    assert {known[0] for known in STRATEGIES.values()} - {STRATEGIES[name][0] for name in names} == ELSEWHERE
    assert {type(case.task).__name__ for case in cases if case.task is not None} == set(TASKS)
    assert {case.optimize.get("optimizer", "sgd") for case in cases} == OPTIMIZERS.keys() - {"adam"}  # adamw's
    orders = {case.load.get("order", "random") for case in cases}
    assert orders == {*options_of(LoaderOptions)["order"].choices} - {"sequential"}
    assert {case.distribute.get("precision", "fp32") for case in cases} == {"fp32", "bf16"}
    assert any(case.resumed for case in cases)


def test_a_difference_is_named() -> None:
    different = load_script("same").different
    epochs = [{"loss": (1.0).hex(), "val_loss": None, "metrics": {"top1": (0.5).hex()}}]
    other = [{**epochs[0], "metrics": {"top1": (0.25).hex()}}]
    before = {name: {"epochs": epochs, "weights": "a"} for name in ("equal", "metric", "weights", "gone")}
    now = {"equal": before["equal"], "metric": {"epochs": other, "weights": "a"}}
    metric, *further = different(before, now | {"weights": {"epochs": epochs, "weights": "b"}})
    assert metric.startswith("metric: epoch 0: {")
    assert (0.25).hex() in metric
    assert further == ["weights: the weights differ", "gone: is missing now"]
