"""What the tests of a step's options run inside ranks, and on one device for comparison."""

from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import fsdp_models as models
import parity_jobs
import torch
from drivetrain import strategies
from parity_jobs import Case, Run, options_of, quiet, train
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
QUICK = [
    (name, option) for name, option in ALL
    if name in parity_jobs.OFTEN
    and option != ("recomputed" if name in parity_jobs.SHARDED else "transformer recomputed")
]  # fmt: skip
"""What `make test` trains: one of the recomputed models with each strategy."""
DEEPSPEED = [("deepspeed_stage_1", "recomputed"), ("deepspeed_stage_3", "transformer recomputed")]
"""What it trains among DeepSpeed's tests, because each start of ranks that import it costs seconds."""


def run_all(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    quiet()
    results: dict[str, Any] = dict(trained(pairs))
    results["overflow"] = {
        f"{name}, clip_norm={clip_norm}": overflow_on_one_rank(name, clip_norm)
        for name in (name for name, option in pairs if option == "fp16")
        for clip_norm in (None, 1.0)
    }
    results["refused"] = {n: refusal(n, models.resnet(), precision="fp16") for n, _ in sorted(REFUSED)}
    return results


def trained(pairs: list[tuple[str, str]]) -> dict[str, Run]:
    found = {}
    for strategy, name in pairs:
        case, options = OPTIONS[name]
        found[f"{strategy}: {name}"] = train(strategy, case, given=options, **options_of(strategy))
    return found


@cache
def without_options(name: str, parts: int) -> Run:
    """One device in fp32 without any option, with as many microbatches as `parts` ranks have."""
    case, _ = OPTIONS[name]
    return train("single", Case("plain", case.model, case.optimizer, case.clip_norm, case.accumulate), parts=parts)


def close(found: Run, expected: Run, tolerance: float, statistics: bool = True) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=tolerance)
    for name, value in expected.state.items():
        if statistics or ("running" not in name and "num_batches" not in name):
            torch.testing.assert_close(found.state[name], value, rtol=0, atol=tolerance)


def check_run(runs: dict[str, Any], strategy: str, name: str, ranks: int) -> None:
    """In fp32 the numbers of one device; half precision rounds.

    BatchNorm's statistics are left out: of four microbatches one device counts four, and two ranks the mean of two.
    """
    tolerance = 1e-5 if OPTIONS[name][0].precision == "fp32" else 3e-2
    close(runs[f"{strategy}: {name}"], without_options(name, ranks), tolerance, statistics=False)


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
