"""This process's place among the ranks; joining the process group; how fast the ranks exchange tensors."""

import os
import statistics
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...common.errors import StrategyError
from ...common.terminal import Wait
from ..devices import local_rank, wait_for
from .meeting import (
    FailedRankError,
    Meeting,
    arrives,
    connect,
    listed,
    meet,
    own_name,
    place,
    post,
    raise_posted,
    under_torchrun,
)

T = TypeVar("T")

_ROUND = 0.2  # seconds between two looks whether another rank has failed to connect
_SECONDS = 2.0  # for one size
_WARM_UP, _FEWEST, _MOST = 2, 3, 30  # all-reduces before the measured ones, and how many these are


def in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_rank() -> bool:
    """Whether something else has started this process as a rank: its group runs, or torchrun's variables are set."""
    return in_group() or under_torchrun()


def refuse_lone_task() -> None:
    """Raise StrategyError if this is one of several tasks of a SLURM step that are no ranks: each would train alone."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")  # srun sets it; a batch script does not have it
    if tasks.isdecimal() and int(tasks) > 1 and not is_rank():
        raise StrategyError(
            f"This is task {os.environ.get('SLURM_PROCID', '?')} of {tasks} of a SLURM step, and nothing joins them: "
            "each would run the full training. Change the line that starts them to one task per node: torchrun "
            "(srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=… --rdzv-backend=c10d "
            "--rdzv-endpoint=… -m drivetrain train …); drivetrain job slurm prints such a script. For separate "
            "trainings, unset SLURM_STEP_NUM_TASKS."
        )


def is_main_process() -> bool:
    if in_group():
        return dist.get_rank() == 0
    return not under_torchrun() or os.environ["RANK"] == "0"


def automatic_devices(device: str | None) -> int:
    """Return the number of ranks that `devices="auto"` means here: the world size of the process group or of torchrun,
    else the number of visible GPUs, else 1. A `device` with an index, such as `"cuda:1"`, is one."""
    if in_group():
        return dist.get_world_size()
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() if device in (None, "cuda") and torch.cuda.is_available() else 1


def of_all_ranks(value: T, ranks: int) -> list[T]:
    """Return the value of each of so many ranks, which is pickled if there are several. Every rank must call it."""
    everyone: list[Any] = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(everyone, value)
    return everyone


def needs_ranks(strategy: object, devices: int) -> bool:
    return devices > 1 or bool(getattr(strategy, "needs_group", False))


COLLECTIVE_TIMEOUT = 600.0
"""Seconds that a collective waits for the other ranks by default: long enough for a slow file system or the first
compilation of a model, and a fraction of torch's half hour."""


def join_group(
    init_method: str = "env://",
    device: str | None = None,
    timeout: float = COLLECTIVE_TIMEOUT,
    meeting: Meeting | None = None,
) -> Meeting | None:
    """Join the process group that RANK and WORLD_SIZE describe; return the meeting, or None with another `init_method`
    than torch's `env://`. Joining and each collective may wait `timeout` seconds for the other ranks."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        here, own = torch.cuda.device_count(), local_rank(rank, ranks)
        # CPU-only jobs may run more ranks than there are GPUs.
        if own is not None and (here == 1 or own < here):
            torch.cuda.set_device(0 if here == 1 else own)
    limit = timedelta(seconds=timeout)
    if init_method != "env://":
        store = _rendezvous(init_method, ranks, limit)
        dist.init_process_group(backend, timeout=limit, rank=rank, world_size=ranks, **store)
        _wait_until_all_joined(Wait(timeout))
        return None
    meeting = meeting or meet(timeout)
    _connect_all(backend, meeting, rank, timeout)
    return meeting


def _rendezvous(init_method: str, ranks: int, limit: timedelta) -> dict[str, Any]:
    """Return where torch finds the other ranks. In a path, it would take ? and # for the begin of other parts of an
    address."""
    if not init_method.startswith("file://"):
        return {"init_method": init_method}
    store = dist.FileStore(init_method.removeprefix("file://"), ranks)  # type: ignore[attr-defined]
    store.set_timeout(limit)
    return {"store": dist.PrefixStore("default_pg", store)}  # type: ignore[attr-defined]


def _connect_all(backend: str, meeting: Meeting, rank: int, timeout: float) -> None:
    """Create the process group of ranks that have met, in a thread that may be left behind: Gloo applies a time limit
    to each of its steps, and knows nothing of a rank that has failed in one."""
    wait, limit, ranks = Wait(timeout), timedelta(seconds=timeout), len(meeting.ranks)
    # A connection of its own: the thread may wait in the other one.
    watched = dist.PrefixStore(f"drivetrain/{meeting.name}", connect(limit))  # type: ignore[attr-defined]
    ended: list[BaseException] = []

    def call() -> None:
        try:
            dist.init_process_group(backend, timeout=limit, store=meeting.store, rank=rank, world_size=ranks)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=call, name="drivetrain-connect", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_ROUND)
            raise_posted(watched, "connecting")
            if wait.left <= 0:
                raise RuntimeError(f"not connected after {timeout:g} s")
            wait.report(lambda: f"{own_name()} waits for the connections of gloo or NCCL to the other {ranks - 1}")
        if ended:
            raise ended[0]
        _wait_until_all_joined(wait, watched)
    except FailedRankError:
        raise
    except RuntimeError as error:
        failure = StrategyError(
            f"{own_name()} met the others at {place()}, but cannot exchange tensors with all of them: "
            f"{str(error).partition(chr(10))[0]}. If their host names lead to 127.x, set GLOO_SOCKET_IFNAME (and "
            "NCCL_SOCKET_IFNAME) to the network interface; drivetrain doctor --ranks shows the addresses."
        )
        post(watched, "connecting", failure)
        raise failure from error


def group_store(name: str) -> Any:
    return dist.PrefixStore(f"drivetrain/{name}", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]


def _wait_until_all_joined(wait: Wait, watched: Any = None) -> None:
    """Wait for all ranks: one that returned at once would close connections that another is still opening."""
    store, ranks = group_store("joined"), dist.get_world_size()
    store.set(str(dist.get_rank()), "")
    joined = 0

    def waits() -> str:
        missing = [rank for rank in range(joined, ranks) if not store.check([str(rank)])]
        return f"Rank {dist.get_rank()} of {ranks} waits for {listed(missing)} to connect to all others"

    while joined < ranks:
        if arrives(store, str(joined)):
            joined += 1
            continue
        if watched is not None:
            raise_posted(watched, "connecting")
        if wait.left <= 0:
            raise RuntimeError(f"rank {joined} did not connect within {wait.limit:g} s")
        wait.report(waits)


@dataclass(frozen=True)
class AllReduce:
    size: int  # bytes of the tensor
    ranks: int
    seconds: tuple[float, ...]  # of each repetition, on the slowest rank

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each rank sends, in a ring and in the median time: `2 (n - 1) / n` times the size.
        nccl-tests names it "busbw"; unlike the size by the time, it does not depend on the number of ranks."""
        return 2 * (self.ranks - 1) / self.ranks * self.size / self.median


def all_reduce_speed(size: int, device: torch.device) -> AllReduce:
    """Measure all-reduces of `size` bytes (a multiple of 4) in the default group; all ranks must call it. It takes
    about two seconds at most, unless three repetitions take longer."""
    values = torch.zeros(max(size // 4, 1), device=device)
    for _ in range(_WARM_UP):
        _timed(values)
    first = _slowest([_timed(values)], device)[0]
    repeats = min(max(int(_SECONDS / max(first, 1e-9)), _FEWEST), _MOST)
    seconds = _slowest([_timed(values) for _ in range(repeats)], device)
    return AllReduce(values.nbytes, dist.get_world_size(), tuple(seconds))


def _timed(values: torch.Tensor) -> float:
    wait_for(values.device)
    start = time.perf_counter()
    dist.all_reduce(values)
    wait_for(values.device)
    return time.perf_counter() - start


def _slowest(seconds: list[float], device: torch.device) -> list[float]:
    times = torch.tensor(seconds, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(each) for each in times.tolist()]
