"""Training methods under DeepSpeed, inside ranks; and the names of its strategies for all of its tests."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import fsdp_models as models
import torch
from drivetrain import strategies
from drivetrain.transforms import EMA, SAM, SWA, GradientClipping, LayerFreezing
from parity_jobs import Run, batch, evaluate, one_step
from pipeline_data import attempt
from strategy_jobs import make_optimizer
from torch import nn
from torch.nn.functional import cross_entropy

STAGES = ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
OFFLOAD = [f"{name}_offload" for name in STAGES]
DIVIDED: dict[str, Any] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""Else stage 3 keeps parameters as small as those of the tests whole."""


def options_of(name: str) -> dict[str, Any]:
    return {"config": DIVIDED} if name.startswith("deepspeed") else {}


def prepare(name: str, model: nn.Module, optimizer: str = "sgd", **options: Any) -> Any:
    strategy = strategies.get(name, device="cpu", **options_of(name))
    return strategy.prepare(model, make_optimizer(optimizer), **options)


def methods() -> dict[str, Any]:
    tried = {
        "EMA": averaged,
        "SWA": stopped_averaging,
        "SAM": lambda name: SAM().perturb(after_backward(name)),
        "GradientClipping": lambda name: GradientClipping("value").clip(after_backward(name)),
        "LayerFreezing": frozen_moves,
    }
    return {f"{kind} {name}": attempt(partial(one, name)) for name in STAGES for kind, one in tried.items()}


def averaged(name: str) -> dict[str, torch.Tensor]:
    """Seen by an evaluation in the middle, and kept at the end."""
    torch.manual_seed(0)
    engine = prepare(name, models.Transformer())
    session = EMA(half_life=2).session(engine.plain_model)
    seen = {}
    for step in range(6):
        engine.model.train()
        one_step(engine, step, *batch(step, 16), Run())
        session.after_step(step / 6)
        if step == 3:
            with session.evaluating():
                seen["evaluated"] = torch.tensor(evaluate(engine, batch(9, 16)[0]))
    session.finish()
    return seen | engine.export_state()


def stopped_averaging(name: str) -> float:
    """How far a step takes the weights from the mean that the model had become before it."""
    engine = prepare(name, models.Transformer())
    session = SWA(start=0.0, end=0.5).session(engine.plain_model)
    for step in range(4):
        one_step(engine, step, *batch(step, 16), Run())
        session.after_step(0.1 + 0.4 * (step == 3))
    mean = engine.export_state()
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    one_step(engine, 5, *batch(5, 16), Run())
    return max(float((t - mean[n]).abs().max()) for n, t in engine.export_state().items())


def after_backward(name: str) -> Iterator[nn.Parameter]:
    engine = prepare(name, models.Transformer())
    engine.backward(cross_entropy(engine.model(batch(0, 16)[0]), batch(0, 16)[1]))
    return engine.plain_model.parameters()


def frozen_moves(name: str) -> float:
    """How far a layer moves that was frozen after some steps."""
    engine = prepare(name, models.Transformer())
    for step in range(4):
        if step == 2:
            LayerFreezing(0.0, 1.0).freeze(engine.plain_model, 0.6)
            before = engine.export_state()["patches.weight"]
        one_step(engine, step, *batch(step, 16), Run())
    return float((engine.export_state()["patches.weight"] - before).abs().max())
