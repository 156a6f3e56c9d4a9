"""What the tests of DDP run inside ranks: small trainings, and what an engine does among ranks."""

import copy
import time
import warnings
from functools import partial

import torch
import torch.distributed as dist
from drivetrain import strategies
from parity_jobs import Case, microbatch_gradients, train
from strategy_jobs import build, make_optimizer, refusal
from torch import nn

small = partial(Case, model=partial(build, False), steps=5, pixels=6)
CASES = [
    small("sgd"),
    small("sgd, clipped", clip_norm=0.05),
    small("sgd, accumulated", accumulate=2),
    small("sgd, clipped, accumulated", clip_norm=0.05, accumulate=2),
    small("adamw", optimizer="adamw"),
    small("adamw, clipped, accumulated", optimizer="adamw", clip_norm=0.05, accumulate=2),
    small("bf16", precision="bf16"),
]
BATCH_NORM = small("batch norm", model=partial(build, True), clip_norm=0.05)


def ddp_everything() -> dict[str, object]:
    """All that is asked of DDP in one launch, because starting ranks costs seconds."""
    rank = dist.get_rank()
    warnings.simplefilter("error")  # as in the tests' own process
    torch.set_num_threads(1)
    # Each rank starts from weights of its own: DDP must begin from rank 0's.
    results: dict[str, object] = {case.name: train("ddp", case, seed=rank) for case in CASES}
    results[BATCH_NORM.name] = train("ddp", BATCH_NORM)
    results["gradients"] = microbatch_gradients("ddp")
    results["buffers"] = synced_buffers()
    results["reduced"] = reduced()
    results["barrier"] = barrier_waits()
    synced = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.SyncBatchNorm(8)))
    results["sync batch norm"] = refusal("ddp", synced)
    results["single"] = refusal("single", build(False))
    results["nested launch"] = strategies.launch(dist.get_rank, devices=2)
    return results


def synced_buffers() -> list[dict[str, torch.Tensor]]:
    """A BatchNorm model's state before and after its statistics were synchronized, and unwrapped."""
    torch.manual_seed(0)
    model = build(True)
    alone = copy.deepcopy(model)
    model[1].running_mean.fill_(dist.get_rank())  # rank 0's zero must win at the start
    engine = strategies.get("ddp", device="cpu").prepare(model, make_optimizer("sgd"))
    torch.manual_seed(engine.rank)
    for images in torch.randn(2, 4, 3, 6, 6):
        engine.model(images)
        alone(images)
    before = engine.export_state()
    engine.sync_buffers()
    return [before, engine.export_state(), alone.state_dict()]


def reduced() -> tuple[float, float, float]:
    """Mean and sum of rank + 1, and what `reduce` left in the tensor it was given."""
    engine = strategies.get("ddp", device="cpu").prepare(build(False), make_optimizer("sgd"))
    value = torch.tensor(engine.rank + 1.0)
    return float(engine.reduce(value)), float(engine.reduce(value, "sum")), float(value)


def barrier_waits() -> float:
    """Seconds this rank waited at a barrier to which rank 1 came 0.5 s late."""
    engine = strategies.get("ddp", device="cpu").prepare(build(False), make_optimizer("sgd"))
    engine.barrier()
    if engine.rank == 1:
        time.sleep(0.5)
    start = time.monotonic()
    engine.barrier()
    return time.monotonic() - start
