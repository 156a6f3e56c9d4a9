"""What the tests of a step's options run inside ranks."""

from __future__ import annotations

from typing import Any

import fsdp_models as models
import parity_jobs
import torch
from drivetrain import strategies
from parity_jobs import Case, options_of, quiet, train
from strategy_jobs import make_optimizer, refusal
from torch import nn

OPTIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "recomputed": (Case("", models.resnet, clip_norm=0.5, accumulate=2), {"activation_checkpointing": True}),
    "transformer recomputed": (Case("", models.Transformer, "adamw"), {"activation_checkpointing": True}),
    "fp16": (Case("", models.Transformer, "adamw", 0.5, 2, "fp16"), {}),
}


NAMES = [*parity_jobs.NAMES, "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
REFUSED = {(name, "fp16") for name in NAMES if name.startswith("deepspeed")}


def run_all() -> dict[str, Any]:
    """Each case under each strategy that can take it, on this rank."""
    quiet()
    results: dict[str, Any] = {
        f"{strategy}: {name}": train(strategy, case, given=options, **options_of(strategy))
        for strategy in NAMES
        for name, (case, options) in OPTIONS.items()
        if (strategy, name) not in REFUSED
    }
    results["overflow"] = {
        name: overflow_on_one_rank(name) for name in ("ddp", "fsdp", "fairscale_sharded_ddp")
    }
    results["refused"] = {
        name: refusal(name, models.resnet(), precision="fp16") for name, _ in sorted(REFUSED)
    }
    return results


def overflow_on_one_rank(strategy: str) -> tuple[bool, float]:
    """Whether weights stayed as they were in a step that overflowed on the last rank only, and the scale then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, 5))
    engine = strategies.get(strategy, device="cpu").prepare(model, make_optimizer("sgd"), precision="fp16")
    before = engine.export_state()
    with engine.forward_context():
        loss = engine.model(torch.randn(4, 3, 4, 4)).float().square().mean()
    engine.backward(loss * (torch.inf if engine.rank == engine.world_size - 1 else 1.0))
    engine.step()
    after = engine.export_state()
    same = all(torch.equal(after[name], value) for name, value in before.items())
    return same, engine.export_optimizer().loss_scale["scale"]
