"""What the tests of `strategies` run inside ranks. A module, because ranks import it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from drivetrain import strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies.launching.group import join_group
from drivetrain.transforms import NoWeightDecay
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, BATCH = 5, 8


@dataclass(frozen=True)
class Case:
    """One training run that two strategies must agree on."""

    name: str
    optimizer: str = "sgd"
    batch_norm: bool = False
    clip_norm: float | None = None
    accumulate: int = 1
    precision: str = "fp32"


CASES = [
    Case("sgd"),
    Case("sgd, clipped", clip_norm=0.05),
    Case("sgd, accumulated", accumulate=2),
    Case("sgd, clipped, accumulated", clip_norm=0.05, accumulate=2),
    Case("adamw", optimizer="adamw"),
    Case("adamw, clipped, accumulated", optimizer="adamw", clip_norm=0.05, accumulate=2),
    Case("bf16", precision="bf16"),
]
BATCH_NORM = Case("batch norm", batch_norm=True, clip_norm=0.05)


@dataclass
class Run:
    """What came out of a training run on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def build(batch_norm: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(8) if batch_norm else nn.GroupNorm(2, 8)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))


def norm_of(norm: torch.Tensor | None) -> float | None:
    """What `Engine.step` gave, as a number."""
    assert norm is None or norm.shape == ()
    return None if norm is None else norm.item()


def make_optimizer(name: str):
    if name == "adamw":
        return lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)
    if name == "no decay":  # two groups, of which one has weight decay
        return NoWeightDecay().optimizer(make_optimizer("adamw"))
    return lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3)


def train(strategy: str, case: Case, seed: int = 0) -> Run:
    """Train on the same global batches on any number of ranks; losses are those of the global batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other cost seconds here
    try:
        return _train(strategy, case, seed)
    finally:
        torch.set_num_threads(threads)


def _train(strategy: str, case: Case, seed: int) -> Run:
    engine = strategies.get(strategy, device="cpu").prepare(
        build(case.batch_norm, seed),
        make_optimizer(case.optimizer),
        precision=case.precision,
        clip_norm=case.clip_norm,
        accumulate=case.accumulate,
    )
    run = Run()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 3, 6, 6, generator=generator)
        labels = torch.randint(5, (BATCH,), generator=generator)
        run.losses.append(_one_step(engine, images, labels, run))
    engine.sync_buffers()
    run.state = engine.export_state()
    return run


def _one_step(engine, images, labels, run: Run) -> float:
    total = torch.zeros(())
    for i in range(engine.accumulate):
        part = BATCH // engine.accumulate // engine.world_size
        start = (i * engine.world_size + engine.rank) * part
        with engine.forward_context():
            outputs = engine.model(images[start : start + part])
            loss = cross_entropy(outputs.float(), labels[start : start + part])
        engine.backward(loss, last_microbatch=i == engine.accumulate - 1)
        total += loss.detach() / engine.accumulate
    run.norms.append(norm_of(engine.step()))
    return float(engine.reduce(total))


def ddp_everything() -> dict[str, object]:
    """All that is asked of DDP in one launch, because starting ranks costs seconds."""
    rank = dist.get_rank()
    warnings.simplefilter("error")  # as in the tests' own process
    # Each rank starts from weights of its own: DDP must begin from rank 0's.
    results: dict[str, object] = {case.name: train("ddp", case, seed=rank) for case in CASES}
    results[BATCH_NORM.name] = train("ddp", BATCH_NORM)
    results["gradients"] = microbatch_gradients()
    results["buffers"] = synced_buffers()
    results["reduced"] = reduced()
    results["barrier"] = barrier_waits()
    results["sync batch norm"] = refusal(
        "ddp", nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.SyncBatchNorm(8)))
    )
    results["single"] = refusal("single", build(False, 0))
    results["nested launch"] = strategies.launch(dist.get_rank, devices=2)
    return results


def microbatch_gradients() -> list[torch.Tensor]:
    """The first weight's gradient after each of two microbatches that differ between the ranks."""
    model = nn.Linear(2, 1, bias=False)
    engine = strategies.get("ddp", device="cpu").prepare(model, make_optimizer("sgd"), accumulate=2)
    gradients = []
    for i in range(2):
        with engine.forward_context():
            loss = engine.model(torch.full((1, 2), float(engine.rank + 1))).sum()
        engine.backward(loss, last_microbatch=i == 1)
        gradients.append(model.weight.grad.clone())
    return gradients


def synced_buffers() -> list[dict[str, torch.Tensor]]:
    """A BatchNorm model's state before and after its statistics were synchronised, and unwrapped."""
    model, alone = build(True, 0), build(True, 0)
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
    engine = strategies.get("ddp", device="cpu").prepare(build(False, 0), make_optimizer("sgd"))
    value = torch.tensor(engine.rank + 1.0)
    return float(engine.reduce(value)), float(engine.reduce(value, "sum")), float(value)


def barrier_waits() -> float:
    """Seconds this rank waited at a barrier to which rank 1 came 0.5 s late."""
    engine = strategies.get("ddp", device="cpu").prepare(build(False, 0), make_optimizer("sgd"))
    engine.barrier()
    if engine.rank == 1:
        time.sleep(0.5)
    start = time.monotonic()
    engine.barrier()
    return time.monotonic() - start


def refusal(strategy: str, model: nn.Module, **options) -> str:
    try:
        strategies.get(strategy, device="cpu").prepare(model, make_optimizer("sgd"), **options)
    except StrategyError as error:
        return str(error)
    return "not refused"


# For tests/test_launch.py


def surroundings(value: int) -> dict[str, object]:
    """What a rank sees around it."""
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    print(f"hello from rank {dist.get_rank()}")
    helper = subprocess.Popen(["sleep", "600"])
    return {
        "value": value,
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "sum": total.item(),
        "pid": os.getpid(),
        "helper": helper.pid,
        "threads": torch.get_num_threads(),
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
    }


class Boom(Exception):
    """An exception that pickles but cannot be loaded again: its constructor wants two arguments."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a + b)


def fail_on_rank_1(how: str) -> None:
    """Rank 1 fails while rank 0 waits for it in a collective."""
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("rank one's own mistake")
        if how == "raise what cannot be loaded":
            raise Boom("left", "right")
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(0)
        if how == "return":
            return
    dist.all_reduce(torch.ones(1))


def wait_for_ever() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def join_with_a_slow_rank(folder: str, seconds: float) -> float:
    """Leave the group and join another one, in which rank 0 still opens its connections for `seconds`. Return how long
    this rank took."""
    rank, init = dist.get_rank(), dist.init_process_group
    dist.barrier()
    dist.destroy_process_group()

    def slowly(*arguments: Any, **options: Any) -> None:
        init(*arguments, **options)
        time.sleep(seconds * (rank == 0))

    dist.init_process_group = slowly
    begin = time.monotonic()
    join_group(f"file://{folder}/again", "cpu")
    return time.monotonic() - begin
