"""DeepSpeed's strategies in this process: names, options, a user's configuration, missing packages, and torch's fused
Adam, with which ZeRO steps an optimizer that it offloads to the CPU."""

import json
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_methods import OFFLOAD, STAGES
from drivetrain import strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies import DeepSpeed
from drivetrain.strategies.deepspeed.config import choose_zero, make_config, read_config
from drivetrain.strategies.deepspeed.strategy import step_fused
from drivetrain.strategies.options import Options
from drivetrain.strategies.registry import STRATEGIES
from strategy_jobs import make_optimizer
from torch import nn
from torch.optim import SGD, Adam, AdamW


def test_names_are_lightnings() -> None:
    names = ["deepspeed", *STAGES, *OFFLOAD, "deepspeed_stage_3_offload_nvme"]
    assert set(names) <= set(STRATEGIES)
    for name in names[1:]:
        assert strategies.get(name).name == name
    assert strategies.get("deepspeed") == DeepSpeed()
    assert DeepSpeed().name == "deepspeed_stage_2"
    assert DeepSpeed(config={"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}).name == OFFLOAD[2]
    with pytest.raises(StrategyError, match="stage=3 contradicts the name 'deepspeed_stage_2'"):
        strategies.get("deepspeed_stage_2", stage=3)


CONFIG = {
    "train_batch_size": "auto",
    "optimizer": "auto",
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": False},
    "bf16": {"enabled": "auto"},
    "amp": {"enabled": "auto", "opt_level": "O1"},
    "steps_per_print": 7,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}


def test_a_configuration_passes_through(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    for config in (CONFIG, path, str(path)):
        read = read_config(config)
        zero = choose_zero(None, None, None, read)
        made = make_config(zero, Options(clip_norm=0.5, accumulate=4), read, "deepspeed")
        assert (zero.stage, zero.offload) == (3, "cpu")
        assert made["steps_per_print"] == 7
        assert (made["gradient_clipping"], made["gradient_accumulation_steps"]) == (0.5, 4)
        assert not {"optimizer", "fp16", "bf16", "amp"} & made.keys()
        section = made["zero_optimization"]
        assert section["reduce_bucket_size"] == 1000
        assert section["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
        assert "offload_param" not in section
    assert make_config(choose_zero(2, None, None, {}), Options(), {}, "deepspeed")["gradient_clipping"] == 0.0


def test_optimizer_and_parameters_are_offloaded_each_as_configured() -> None:
    def section(offload: str | None = None, **given: str) -> dict[str, Any]:
        config = {"zero_optimization": {f"offload_{part}": {"device": device} for part, device in given.items()}}
        made: dict[str, Any] = make_config(choose_zero(3, offload, "/disk", config), Options(), config, "deepspeed")
        return {part: made["zero_optimization"].get(f"offload_{part}") for part in ("optimizer", "param")}

    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/disk"}
    assert section() == {"optimizer": None, "param": None}
    assert section("cpu") == section("cpu", param="cpu") == {"optimizer": cpu, "param": cpu}
    assert section("nvme") == {"optimizer": nvme, "param": nvme}
    assert section(optimizer="cpu", param="none") == {"optimizer": cpu, "param": {"device": "none"}}
    assert section(param="cpu") == {"optimizer": None, "param": cpu}
    assert section(optimizer="cpu", param="nvme") == {"optimizer": cpu, "param": nvme}
    with pytest.raises(StrategyError, match="offload_param='nvme' contradicts offload='cpu'"):
        section("cpu", param="nvme")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping=1.0 contradicts clip_norm=None"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 contradicts accumulate=1"),
        ({"optimizer": {"type": "Adam"}}, r"config\['optimizer'\] cannot be set, because Drivetrain passes"),
        ({"scheduler": {"type": "WarmupLR"}}, r"config\['scheduler'\] cannot be set"),
        ({"train_batch_size": 8}, r"config\['train_batch_size'\] cannot be set"),
        ({"train_micro_batch_size_per_gpu": 8}, r"config\['train_micro_batch_size_per_gpu'\]"),
        ({"bf16": {"enabled": True}}, r"config\['bf16'\] cannot be set, because precision"),
        ({"fp16": {"enabled": True}}, r"config\['fp16'\] cannot be set"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer=True contradicts the optimizer"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage=3 contradicts stage=2"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "'nvme' needs stage=3"),
        ({"zero_optimization": 3}, "must be an object"),
    ],
)  # fmt: skip
def test_a_configuration_must_not_contradict(config: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        strategies.get("deepspeed_stage_2", device="cpu", config=config).prepare(nn.Linear(2, 1), make_optimizer("sgd"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 0}, "stage=0 must be 1, 2 or 3"),
        ({"offload": "disk"}, "offload='disk' is unknown"),
        ({"stage": 2, "offload": "nvme"}, "'nvme' needs stage=3"),
        ({"offload": "cpu", "config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}}, "contradicts"),
        (
            {"nvme_path": "/b", "config": {"zero_optimization": {
                "stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}
            }}},
            "offload_param.nvme_path='/a' contradicts nvme_path='/b'",
        ),
        ({"nvme_path": "/disk"}, "nvme_path='/disk' has no effect.* Leave it out, or pass stage=3 and offload='nvme'"),
        ({"stage": 3, "offload": "cpu", "nvme_path": "/disk"}, "nvme_path='/disk' has no effect"),
        ({"config": "missing.json"}, "config='missing.json' cannot be read as a JSON file"),
        ({"config": 3}, "cannot be read"),
        ({"config": {"zero_optimization": {"offload_optimizer": "cpu"}}}, "='cpu' must be an object"),
    ],
)  # fmt: skip
def test_options_that_mean_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        DeepSpeed(**options)


def test_nvme_says_what_it_needs(tmp_path: Path) -> None:
    """Where libaio is, that a folder must be given; where it is not, so."""
    if find_library("aio") is None:
        with pytest.raises(StrategyError, match="Install a C\\+\\+ compiler, ninja and libaio-dev"):
            strategies.get("deepspeed_stage_3_offload_nvme", nvme_path=str(tmp_path)).check(1)
    else:
        with pytest.raises(StrategyError, match=r"nvme_path=None is not a folder|libaio-dev"):
            strategies.get("deepspeed_stage_3_offload_nvme").check(1)


def scheduled(params: Any) -> AdamW:
    optimizer = AdamW(params)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces `step`
    return optimizer


def hooked(params: Any) -> AdamW:
    optimizer = AdamW(params)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


ADAMS: dict[str, Callable[[Any], Adam]] = {
    "defaults": AdamW,
    "scheduled": scheduled,
    "hooked": hooked,
    "maximize": lambda p: Adam(p, maximize=True),
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
