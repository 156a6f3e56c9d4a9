"""What the DeepSpeed tests run inside ranks."""

import gc
import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import fsdp_models as models
import step_option_jobs as step_options
import torch
import torch.distributed as dist
from deepspeed_methods import OFFLOAD, STAGES, methods, options_of, prepare
from drivetrain import Pipeline, strategies
from drivetrain.strategies import OptimizerState
from drivetrain.strategies.common.memory import held_bytes
from fsdp_jobs import on_meta, surgeries
from parity_jobs import BF16, CASES, FEW, KINDS, Case, Run, batch, longer, one_step, train
from pipeline_data import attempt, fitted
from strategy_jobs import make_optimizer, refusal
from torch import nn
from torch.nn.functional import cross_entropy

MOVES = [
    ("ddp", "deepspeed_stage_1"), ("deepspeed_stage_1", "deepspeed_stage_2_offload"),
    ("deepspeed_stage_2_offload", "deepspeed_stage_3"), ("deepspeed_stage_3", "fsdp"),
    ("fsdp", "deepspeed_stage_3_offload"), ("deepspeed_stage_3_offload", "ddp"),
    ("ddp", "deepspeed_stage_2"), ("deepspeed_stage_2", "ddp"),
]  # fmt: skip
UNUSED = ["torch._inductor.compile_fx", "mlflow"]
"""What DeepSpeed would import for its Muon and its autotuner, which no training here uses; each takes seconds."""
FIRST = surgeries()[::5]
"""The surgeries of `make test`; those of FSDP are all."""
DISCARDING = [STAGES[0], OFFLOAD[-1]]
"""Those that throw gradients away in `make test`."""
MOVED = [Case("transformer adamw", models.Transformer, "adamw", 0.5, 2), Case("resnet sgd", models.resnet)]
"""Between two strategies: each of DeepSpeed's gives to another once, and takes once."""


def everything(pipelines: dict[str, Pipeline]) -> dict[str, Any]:
    """All that is asked of DeepSpeed in one launch, because starting ranks and importing it costs seconds."""
    results: dict[str, Any] = {"missing": said_where_it_is_missing()}
    warnings.simplefilter("error")  # as in the tests' own process
    warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    torch.set_num_threads(1)
    before = process()
    with captured() as printed:
        results |= parity(STAGES[:2], FEW)
        gc.freeze()  # stage 3 collects garbage for each engine, which what was imported makes slow
        results |= parity(STAGES[2:], FEW) | parity(OFFLOAD, FEW[:1])
    results["imported"] = [name for name in UNUSED if name in sys.modules]
    results["printed"] = printed.read_text()
    printed.unlink()
    results["process"] = before, process()
    results |= parity(STAGES[2:], KINDS) | parity(STAGES[1:], BF16[1:])
    # GyroDropout draws its masks when it is made: from the same seed on each rank.
    results |= {f"{s} {c.name}": train(s, c, **options_of(s)) for s in STAGES[2:] for c in FIRST}
    results |= {"ddp " + FEW[0].name: train("ddp", FEW[0]), "options": step_options.trained(step_options.DEEPSPEED)}
    results |= {f"{a} to {b}": moved(a, b, MOVED[0]) for a, b in MOVES[:4]}
    results["discarded"] = {name: discarded(name) for name in DISCARDING}
    results["fused"] = {name: fused(name) for name in (*STAGES, *OFFLOAD)}
    results["held"] = {name: held(name) for name in STAGES}
    results["meta"] = {name: prepare(name, meta()).export_state() for name in STAGES}
    results["methods"] = methods()
    results["refusals"] = refusals()
    results["pipelines"] = {name: fitted(pipeline) for name, pipeline in pipelines.items()}
    gc.unfreeze()  # else the interpreter complains of leaks when it ends
    return results


def said_where_it_is_missing() -> list[str]:
    """In the table of all strategies, and by a check. The table does not import it to find out that it is there."""
    strategies.available()
    assert "deepspeed" not in sys.modules
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    try:
        row = next(row for row in strategies.available() if row.name == "deepspeed_stage_2")
        assert not row.runs_here
        return [row.why_not, str(attempt(lambda: strategies.get("deepspeed", device="cpu").check(1)))]
    finally:
        del sys.modules["deepspeed"]


def parity(names: list[str], cases: list[Case]) -> dict[str, Run]:
    """Each rank starts from weights of its own: rank 0's must become everyone's."""
    seed, pairs = dist.get_rank(), product(names, cases)
    return {f"{name} {case.name}": train(name, case, seed=seed, **options_of(name)) for name, case in pairs}


def every_case() -> dict[str, Any]:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    gc.freeze()
    results: dict[str, Any] = dict(parity([*STAGES, *OFFLOAD], longer(CASES)))
    results |= {f"{a} to {b} {case.name}": moved(a, b, case) for a, b in MOVES for case in longer(MOVED)}
    results |= parity(OFFLOAD[1:], longer([*KINDS, *BF16])) | parity(STAGES[1:], longer(BF16))
    results |= {f"{s} {c.name}": train(s, c, **options_of(s)) for s in STAGES[1:] for c in surgeries()}
    results["held"] = {name: held(name) for name in STAGES}
    results["discarded"] = {name: discarded(name, models.Transformer) for name in (*STAGES, *OFFLOAD)}
    gc.unfreeze()
    return results


def process() -> dict[str, Any]:
    """What a library may change for everybody."""
    return {
        "environment": dict(os.environ),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "filters": list(warnings.filters),
        "logging": (logging.getLogger().level, logging.getLogger().handlers[:], logging.root.manager.disable),
        "threads": torch.get_num_threads(),
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "torch": (torch.get_default_dtype(), torch.nn.functional.linear, nn.Module.__init__, torch.empty),
    }


@contextmanager
def captured() -> Iterator[Path]:
    """The file to which standard output and error go inside it, also from C."""
    descriptor, name = tempfile.mkstemp()
    kept = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(descriptor, number)
    try:
        yield Path(name)
    finally:
        for number, own in enumerate(kept, 1):
            os.dup2(own, number)
            os.close(own)
        os.close(descriptor)


def moved(first: str, second: str, case: Case) -> tuple[Run, OptimizerState]:
    """Half of a training with one strategy, the rest with another; its losses, weights and optimizer."""
    run = Run()
    torch.manual_seed(0)
    options = {"clip_norm": case.clip_norm, "accumulate": case.accumulate}
    engine = prepare(first, case.model(), case.optimizer, **options)
    for step in range(case.steps):
        if step == case.steps // 2:
            engine.sync_buffers()
            state, optimizer = engine.export_state(), engine.export_optimizer()
            engine = prepare(second, case.model(), case.optimizer, **options)  # other weights
            engine.import_state(state)
            engine.import_optimizer(optimizer)
        engine.model.train()
        run.losses.append(one_step(engine, step, *batch(step, case.pixels), run))
    engine.sync_buffers()
    run.state = engine.export_state()
    return run, engine.export_optimizer()


def discarded(name: str, factory: Callable[[], nn.Module] = models.Tied) -> list[dict[str, torch.Tensor]]:
    """Weights after two steps, the second time with gradients in between that were thrown away."""
    states = []
    for wasted in (0, 1, 2):
        torch.manual_seed(0)
        engine = prepare(name, factory(), accumulate=2, clip_norm=0.5)
        for step in range(2):
            for number in range(wasted):
                gradients(engine, 10 + step, number)
            engine.zero_grad()
            for number in range(2):
                gradients(engine, step, number)
            engine.step()
        states.append(engine.export_state())
    return states


def fused(name: str) -> list[Any]:
    made = [prepare(name, nn.Linear(2, 1), optimizer).optimizer for optimizer in ("adamw", "sgd")]
    return [(type(each).__name__, each.param_groups[0]["fused"]) for each in made]


def gradients(engine: Any, step: int, number: int) -> None:
    images, labels = (part.chunk(2)[number].chunk(engine.world_size)[engine.rank] for part in batch(step, 16))
    engine.backward(cross_entropy(engine.model(images), labels), last_microbatch=number == 1)


def held(name: str) -> dict[str, float]:
    """Bytes per parameter on this rank, AdamW in fp32, with DeepSpeed's own choice of what stage 3 divides.

    Four equal layers, so that no parameter lies across the parts of two ranks: both would hold its whole gradient.
    """
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)))
    engine = strategies.get(name, device="cpu").prepare(model, make_optimizer("adamw"))
    for step in range(2):
        engine.backward(engine.model(torch.randn(2, 1024)).square().mean())
        found = held_bytes(engine)
        if step == 0:
            engine.step()
    assert found.count == 4 * (1024 * 1024 + 1024)
    parts = {"parameters": found.parameters, "gradients": found.gradients, "optimizer": found.optimizer}
    return {part: count / found.count for part, count in parts.items()}


def meta() -> nn.Module:
    with torch.device("meta"):
        model = on_meta()
    torch.manual_seed(dist.get_rank())
    return model


def refusals() -> dict[str, str]:
    twice = nn.Linear(2, 1)
    prepare("deepspeed_stage_2", twice)
    scalar = nn.Linear(2, 1)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    diverged = prepare("deepspeed_stage_2", nn.Linear(2, 1))
    diverged.backward(diverged.model(torch.full((1, 2), torch.inf)).sum())
    return {
        "twice": refusal("deepspeed_stage_3", twice),
        "scalar": refusal("deepspeed_stage_1", scalar),
        "wrapped": refusal("deepspeed_stage_2", wrapped),
        "lazy": refusal("deepspeed_stage_3", nn.Sequential(nn.LazyLinear(2))),
        "infinite": str(attempt(diverged.step)),
        "uneven": uneven(),
    }


def uneven() -> str:
    """An optimizer whose parameters have made different numbers of steps."""
    engine = prepare("deepspeed_stage_2", nn.Linear(2, 1), "adamw")
    engine.backward(engine.model(torch.ones(1, 2)).sum())
    engine.step()
    state = engine.export_optimizer()
    state.entries["bias"]["step"] += 1
    return str(attempt(lambda: engine.import_optimizer(state)))
