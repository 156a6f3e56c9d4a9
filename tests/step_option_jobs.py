"""What the tests of a step's options run inside ranks."""

from __future__ import annotations

from typing import Any

import fsdp_models as models
from parity_jobs import Case, Run, train

OPTIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "recomputed": (Case("", models.resnet, clip_norm=0.5, accumulate=2), {"activation_checkpointing": True}),
    "transformer recomputed": (Case("", models.Transformer, "adamw"), {"activation_checkpointing": True}),
    "fp16": (Case("", models.Transformer, "adamw", 0.5, 2, "fp16"), {}),
}


def run_all() -> dict[str, Run]:
    """Each case under each strategy that can take it, on this rank."""
    return {
        f"{strategy}: {name}": train(strategy, case, given=options)
        for strategy in ("ddp", "fsdp", "fsdp_grad_op", "fsdp_cpu_offload")
        for name, (case, options) in OPTIONS.items()
    }
