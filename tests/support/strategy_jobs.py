"""What the tests of `strategies` run inside ranks. A module, because ranks import it."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drivetrain import strategies
from drivetrain.common.errors import StrategyError
from drivetrain.strategies.launching.group import join_group
from drivetrain.transforms import NoWeightDecay
from torch import nn


def build(batch_norm: bool) -> nn.Module:
    norm = nn.BatchNorm2d(8) if batch_norm else nn.GroupNorm(2, 8)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))


def norm_of(norm: torch.Tensor | None) -> float | None:
    assert norm is None or norm.shape == ()
    return None if norm is None else norm.item()


def make_optimizer(name: str):
    if name == "adamw":
        return lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)
    if name == "no decay":  # two groups, of which one has weight decay
        return NoWeightDecay().optimizer(make_optimizer("adamw"))
    return lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3)


def refusal(strategy: str, model: nn.Module, **options) -> str:
    try:
        strategies.get(strategy, device="cpu").prepare(model, make_optimizer("sgd"), **options)
    except StrategyError as error:
        return str(error)
    return "not refused"


def surroundings(value: int) -> dict[str, object]:
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
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    elif how == "raise":
        raise ValueError("rank one's own mistake")
    elif how == "raise what cannot be loaded":
        raise Boom("left", "right")
    elif how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(0)


def wait_for_ever() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def ignore_ctrl_c(folder: Path) -> None:
    """Say so in a file; rank 0 then sleeps, and rank 1 waits for it in a collective."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dist.barrier()
    (folder / f"{dist.get_rank()}").touch()
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1))
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


def hang_here() -> None:
    time.sleep(600)


def hang_on_rank_1(how: str) -> None:
    """Rank 1 sleeps, while rank 0 waits for it in a collective, ends as by NCCL's watchdog, or has returned."""
    dist.barrier()
    if dist.get_rank() == 1:
        hang_here()
    if how == "waits":
        dist.all_reduce(torch.ones(1))
    elif how == "aborts":
        time.sleep(0.5)
        os.abort()


def work_until(place: Path) -> str:
    """Leave this process's id in a file; return what another file has, once it is there."""
    place.with_suffix(f".{dist.get_rank()}").write_text(str(os.getpid()))
    while not place.exists():
        time.sleep(0.05)
    return place.read_text()


def save_until(place: Path) -> None:
    """Work, and after Ctrl-C, as if to save, until the file is there."""
    try:
        work_until(place.with_name("never"))
    except KeyboardInterrupt:
        work_until(place)
        raise
