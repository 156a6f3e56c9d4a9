"""The registry, `Single`, and what an engine rejects, in this process."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from ddp_jobs import BATCH_NORM, CASES
from drivetrain import strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import DDP, Single
from parity_jobs import Case, train
from strategy_jobs import make_optimizer
from torch import nn


def prepare(model: nn.Module | None = None, **options: object) -> strategies.Engine:
    return Single("cpu").prepare(model or nn.Linear(2, 1, bias=False), make_optimizer("sgd"), **options)


def test_get_by_name_with_options() -> None:
    assert strategies.get("single", device="cpu") == Single("cpu")
    assert strategies.get("ddp") == DDP()


def test_get_returns_a_strategy_object_as_it_is() -> None:
    strategy = DDP("cpu")
    assert strategies.get(strategy) is strategy


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("dddp", {}, "Did you mean 'ddp'"),
        ("ddp", {"devcie": "cpu"}, "Did you mean 'device'"),
        (DDP, {}, "Pass an object"),
        (DDP(), {"device": "cpu"}, "cannot be combined with a 'ddp' strategy object"),
        (42, {}, "a int is not a strategy"),
    ],
)
def test_get_refuses(strategy: object, options: dict[str, object], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        strategies.get(strategy, **options)


@pytest.mark.process
def test_importing_the_folder_does_not_import_torch() -> None:
    code = (
        "import drivetrain.strategies, drivetrain.strategies.launching.rank_main, sys; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_launch_stays_the_function_whatever_is_imported() -> None:
    import drivetrain.strategies.launching.launcher

    assert callable(strategies.launch)
    assert strategies.launch is drivetrain.strategies.launching.launcher.launch


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize("devices", [0, 2])
def test_single_takes_one_device(devices: int) -> None:
    with pytest.raises(StrategyError, match=f"not {devices}"):
        Single().check(devices)


NOT_HERE = "use fewer devices" if torch.cuda.is_available() else "finds none here. Set device='cpu'"


@pytest.mark.parametrize(
    ("strategy", "devices", "words"),
    [
        (Single("tpu9"), 1, "not a torch device"),
        (Single("meta"), 1, "not supported"),
        (Single("cuda:99"), 1, NOT_HERE),
        (DDP("cuda"), 99, NOT_HERE),
        (DDP("cuda:1"), 2, "cannot be the same for all ranks"),
        (DDP("cpu"), 0, "a positive integer"),
        (
            DDP("cpu"),
            8 * CORES + 1,
            f"devices={8 * CORES + 1} .* on the {CORES} CPU core.*at most {8 * CORES}",
        ),
    ],
)
def test_check_refuses_devices_that_are_not_here(
    strategy: strategies.Strategy, devices: int, words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        strategy.check(devices)


def test_the_cores_of_the_cpu_suffice_for_several_ranks_each() -> None:
    DDP("cpu").check(8 * CORES)


@pytest.mark.parametrize(
    ("option", "value"),
    [("precision", "fp64"), ("clip_norm", 0.0), ("clip_norm", math.nan), ("accumulate", 0)],
)
@pytest.mark.parametrize("name", ["single", "ddp"])
def test_prepare_refuses(name: str, option: str, value: object) -> None:
    with pytest.raises(StrategyError, match=f"{option}={value!r}"):
        strategies.get(name, device="cpu").prepare(nn.Linear(2, 1), make_optimizer("sgd"), **{option: value})


def test_prepare_refuses_a_model_that_cannot_train() -> None:
    with pytest.raises(StrategyError, match="Linear has no parameter that requires a gradient"):
        prepare(nn.Linear(2, 1).requires_grad_(False))


def test_frozen_parameters_do_not_reach_the_optimizer() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    engine = prepare(model)
    assert [p.shape for g in engine.optimizer.param_groups for p in g["params"]] == [(1, 2)]


def test_step_clips_steps_and_zeroes() -> None:
    model = nn.Linear(2, 1, bias=False)
    engine = Single("cpu").prepare(model, lambda p: torch.optim.SGD(p, lr=1.0), clip_norm=1.0)
    before = model.weight.detach().clone()
    engine.backward(engine.model(torch.tensor([[3.0, 4.0]])).sum())
    assert engine.step() == pytest.approx(5.0)
    torch.testing.assert_close(before - model.weight, torch.tensor([[0.6, 0.8]]))
    assert model.weight.grad is None


def test_step_without_clipping_returns_none() -> None:
    engine = prepare()
    engine.backward(engine.model(torch.ones(1, 2)).sum())
    assert engine.step() is None


def test_backward_refuses_another_number_of_microbatches() -> None:
    engine = prepare(accumulate=2)
    loss = engine.model(torch.ones(1, 2)).sum()
    with pytest.raises(StrategyError, match="microbatch 1 of accumulate=2"):
        engine.backward(loss)
    engine.backward(loss, last_microbatch=False)
    with pytest.raises(StrategyError, match="1 of accumulate=2"):
        engine.step()


def test_bf16_keeps_fp32_weights() -> None:
    engine = prepare(precision="bf16")
    with engine.forward_context():
        assert engine.model(torch.ones(1, 2)).dtype == torch.bfloat16
    assert engine.plain_model.weight.dtype == torch.float32


def test_export_state_is_a_contiguous_copy() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    engine = prepare(model)
    state = engine.export_state()
    assert list(state) == ["weight", "bias"]
    assert state["weight"].is_contiguous()
    torch.testing.assert_close(state["weight"], model.weight.detach(), rtol=0, atol=0)
    with torch.no_grad():
        model.bias.fill_(7)
    assert not (state["bias"] == 7).any()


def test_export_state_refuses_what_is_no_tensor() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> str:
            return "odd"

    with pytest.raises(StrategyError, match="'_extra_state' is a str"):
        prepare(Odd(2, 1)).export_state()


def test_reduce_on_one_rank_is_a_copy() -> None:
    engine = prepare()
    value = torch.tensor(3.0)
    result = engine.reduce(value, "sum")
    result += 1
    assert value == 3
    assert engine.reduce(value) == 3
    with pytest.raises(StrategyError, match="op='max'"):
        engine.reduce(value, "max")


@pytest.mark.parametrize("case", [*CASES, BATCH_NORM], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["ddp", "dp"])
def test_alone_in_a_process_it_is_single(name: str, case: Case) -> None:
    """`dp` on the CPU."""
    single, other = train("single", case), train(name, case)
    assert (other.losses, other.norms) == (single.losses, single.norms)


def test_accumulation_is_the_whole_batch_at_once() -> None:
    whole, parts = train("single", CASES[0]), train("single", CASES[2])
    assert parts.losses == pytest.approx(whole.losses, abs=1e-6)
