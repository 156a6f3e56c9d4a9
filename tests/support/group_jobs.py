"""Groups by name, optimizers and schedules of a pipeline's configuration under every strategy, inside ranks."""

from typing import Any

import fsdp_models as models
import pytest
import torch
from deepspeed_methods import DIVIDED
from drivetrain import strategies
from drivetrain.pipeline.optim.config import OptimizerConfig
from drivetrain.pipeline.optim.groups import GroupedFactory
from drivetrain.pipeline.training.schedule import Schedule
from drivetrain.strategies import OptimizerState
from drivetrain.transforms import NoWeightDecay
from parity_jobs import Run, batch, one_step, options_of, quiet
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

STEPS, SAVED = 6, 3
GROUPS = {"head.*": {"lr": 0.05, "weight_decay": 0.3}, "*weight": {"betas": (0.8, 0.9)}}


def cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=STEPS)


CONFIGS = {
    "adamw": OptimizerConfig("adamw", {"lr": 0.01, "weight_decay": 0.1}, groups=GROUPS, schedule=cycle, warmup=0.4),
    "muon": OptimizerConfig("muon", {"lr": 0.02, "adamw_lr": 0.01}, groups=GROUPS, schedule="wsd"),
    "adamuon": OptimizerConfig("adamuon", {"lr": 0.01}, groups=GROUPS, schedule="wsd"),
    "schedulefree": OptimizerConfig(
        "schedulefree_adamw",
        {"lr": 0.01, "weight_decay": 0.1},
        groups=GROUPS,
        schedule="constant",
        warmup=0.4,
    ),
    "nadam": OptimizerConfig(torch.optim.NAdam, {"lr": 0.01}, groups=GROUPS, schedule="wsd"),
}


def engine_of(strategy: str, config: OptimizerConfig, seed: int) -> tuple[Any, str]:
    torch.manual_seed(seed)
    model: nn.Module = models.Transformer()
    factory = GroupedFactory(NoWeightDecay().optimizer(config.factory), config.groups, model)
    options = {"config": DIVIDED} if strategy.startswith("deepspeed") else options_of(strategy)
    engine = strategies.get(strategy, device="cpu", **options).prepare(model, factory, clip_norm=0.5)
    return engine, factory.note


def steps(engine: Any, schedule: Schedule, first: int, last: int) -> list[tuple[float, float]]:
    engine.model.train()
    found = []
    for step in range(first, last):
        rate = schedule.set_lr(step)
        found.append((one_step(engine, step, *batch(step, 16), Run()), rate))
    return found


def trained(strategy: str, name: str) -> dict[str, Any]:
    """Losses and learning rates of a whole training, and of its second half by another engine; and the groups."""
    config = CONFIGS[name]
    engine, note = engine_of(strategy, config, seed=0)
    schedule = Schedule(config, engine.optimizer, STEPS)
    losses = steps(engine, schedule, 0, SAVED)
    weights, state = engine.export_state(), engine.export_optimizer()
    losses += steps(engine, schedule, SAVED, STEPS)
    other, _ = engine_of(strategy, config, seed=1)
    again = Schedule(config, other.optimizer, STEPS)
    other.import_state(weights)
    other.import_optimizer(OptimizerState(state.groups, dict(state.entries), state.loss_scale))
    resumed = steps(other, again, SAVED, STEPS)
    groups = [(group["params"], group["weight_decay"], group["betas"]) for group in state.groups]
    return {"losses": losses, "resumed": resumed, "groups": groups, "note": note}


def all_of(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    quiet()
    return {(strategy, config): trained(strategy, config) for strategy, config in pairs}


def assert_nearly(found: dict[str, Any], alone: dict[str, Any], strategy: str) -> None:
    """A strategy's groups are one device's, and its losses are nearly, also after a resume."""
    assert found["groups"] == alone["groups"], strategy
    for run in ("losses", "resumed"):
        losses = [loss for loss, _ in alone["losses"]][-len(found[run]) :]
        assert [loss for loss, _ in found[run]] == pytest.approx(losses, abs=2e-5), f"{strategy} {run}"
