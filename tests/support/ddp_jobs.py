"""What the tests of DDP run inside ranks: what an engine does among them."""

import copy
import time

import torch
import torch.distributed as dist
from drivetrain import strategies
from parity_jobs import microbatch_gradients, quiet
from strategy_jobs import build, make_optimizer, refusal
from torch import nn


def ddp_everything() -> dict[str, object]:
    """All that is asked of DDP in one launch, because starting ranks costs seconds."""
    quiet()
    synced = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.SyncBatchNorm(8)))
    return {
        "gradients": microbatch_gradients("ddp"),
        "buffers": synced_buffers(),
        "reduced": reduced(),
        "barrier": barrier_waits(),
        "sync batch norm": refusal("ddp", synced),
        "single": refusal("single", build(False)),
        "nested launch": strategies.launch(dist.get_rank, devices=2),
    }


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
