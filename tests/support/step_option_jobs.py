"""What the tests of a step's options run inside ranks."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import fsdp_models as models
import parity_jobs
import torch
from drivetrain import strategies
from parity_jobs import Case, options_of, quiet, train
from strategy_jobs import make_optimizer, norm_of, refusal
from torch import nn

OPTIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "recomputed": (Case("", models.resnet, clip_norm=0.5, accumulate=2), {"activation_checkpointing": True}),
    "transformer recomputed": (Case("", models.Transformer, "adamw"), {"activation_checkpointing": True}),
    "fp16": (Case("", models.Transformer, "adamw", 0.5, 2, "fp16"), {}),
}
NAMES = [*parity_jobs.NAMES, "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
REFUSED = {(name, "fp16") for name in NAMES if name.startswith("deepspeed")}
ALL = [pair for pair in product(NAMES, OPTIONS) if pair not in REFUSED]
SHARDED = [*parity_jobs.SHARDED, "deepspeed_stage_3"]
QUICK = [
    (name, option) for name, option in ALL
    if name in (*parity_jobs.OFTEN, "deepspeed_stage_1", "deepspeed_stage_3")
    and option != ("recomputed" if name in SHARDED else "transformer recomputed")
]  # fmt: skip
"""What `make test` trains: one of the recomputed models with each strategy."""


def run_all(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    quiet()
    results: dict[str, Any] = {}
    for strategy, name in pairs:
        case, options = OPTIONS[name]
        results[f"{strategy}: {name}"] = train(strategy, case, given=options, **options_of(strategy))
    results["overflow"] = {
        f"{name}, clip_norm={clip_norm}": overflow_on_one_rank(name, clip_norm)
        for name in (name for name, option in pairs if option == "fp16")
        for clip_norm in (None, 1.0)
    }
    results["refused"] = {n: refusal(n, models.resnet(), precision="fp16") for n, _ in sorted(REFUSED)}
    return results


@dataclass
class Overflow:
    """The result of a step that overflowed on the last rank only, and of the next one, which did not: for each whether
    the weights are unchanged, `skipped` and the norm; and the scale after both."""

    same: list[bool] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    scale: float = 0.0


def overflow_on_one_rank(strategy: str, clip_norm: float | None) -> Overflow:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, 5))
    engine = strategies.get(strategy, device="cpu", **options_of(strategy)).prepare(
        model, make_optimizer("sgd"), precision="fp16", clip_norm=clip_norm
    )
    found, before = Overflow(), engine.export_state()
    for factor in (torch.inf, 1.0):
        with engine.forward_context():
            loss = engine.model(torch.randn(4, 3, 4, 4)).float().square().mean()
        engine.backward(loss * (factor if engine.rank == engine.world_size - 1 else 1.0))
        found.norms.append(norm_of(engine.step()))
        found.skipped.append(engine.skipped)
        after = engine.export_state()
        found.same.append(all(torch.equal(after[name], value) for name, value in before.items()))
    found.scale = engine.export_optimizer().loss_scale["scale"]
    return found
