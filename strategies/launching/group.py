"""This process's place among the ranks: whether it is one, the first, and joining the process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import StrategyError
from ..devices import local_rank
from .meeting import Meeting, meet, place

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher that sets the same variables) started this process."""
    return all(name in os.environ for name in _TORCHRUN)


def in_group() -> bool:
    """Whether a process group runs here."""
    return dist.is_available() and dist.is_initialized()


def is_rank() -> bool:
    """Whether this process is a rank that something else has started: its group runs, or torchrun's variables are set.

    Single variables, such as a RANK that a shell has left, do not make a rank.
    """
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
    """Whether this process is rank 0, or no rank at all."""
    if in_group():
        return dist.get_rank() == 0
    return not under_torchrun() or os.environ["RANK"] == "0"


def automatic_devices(device: str | None) -> int:
    """Return the number of ranks that `devices="auto"` means here: the world size of the process group or of torchrun,
    else the number of visible GPUs, else 1.

    Args:
        device: what the ranks train on: `"cpu"`, a CUDA device, or None for CUDA if available. A device with an index,
            such as `"cuda:1"`, is one.
    """
    if in_group():
        return dist.get_world_size()
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() if device in (None, "cuda") and torch.cuda.is_available() else 1


def needs_ranks(strategy: object, devices: int) -> bool:
    """Whether a strategy trains in a process group: on several devices, or with `needs_group` on one, too."""
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
    """Join the process group that RANK and WORLD_SIZE describe.

    Gloo handles CPU tensors and, unless the ranks train on the CPU, NCCL handles CUDA tensors. Without `device`, this
    rank's GPU becomes CUDA's current device if it has one; a strategy sets it by itself.

    Args:
        init_method: as torch's. By default the ranks meet at MASTER_ADDR and MASTER_PORT; see `meet`.
        device: what the ranks train on: `"cpu"`, which uses no GPU, `"cuda"`, or None for CUDA if available.
        timeout: seconds that joining and each collective may wait for the other ranks.
        meeting: of these ranks, if they have met already.

    Returns:
        The meeting; None with another `init_method`.

    Raises:
        StrategyError: if a rank does not arrive in time, or cannot be reached.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        here, own = torch.cuda.device_count(), local_rank(rank, ranks)
        # CPU-only jobs may run more ranks than there are GPUs.
        if own is not None and (here == 1 or own < here):
            torch.cuda.set_device(0 if here == 1 else own)
    patience = timedelta(seconds=timeout)
    if init_method != "env://":
        dist.init_process_group(
            backend, timeout=patience, init_method=init_method, rank=rank, world_size=ranks
        )
        _wait_until_all_joined(patience)
        return None
    meeting = meeting or meet(timeout)
    try:
        dist.init_process_group(backend, timeout=patience, store=meeting.store, rank=rank, world_size=ranks)
        _wait_until_all_joined(patience)
    except RuntimeError as error:
        raise StrategyError(
            f"Rank {rank} of {ranks} ({meeting.ranks[rank]['host']}) met the others at {place()}, but cannot exchange "
            f"tensors with all of them: {str(error).partition(chr(10))[0]}. If their host names lead to 127.x, set "
            "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface; drivetrain doctor --ranks shows "
            "the addresses."
        ) from error
    return meeting


def group_store(name: str) -> Any:
    """Return the process group's store, with keys of its own: `drivetrain/`, `name` and a slash precede them."""
    return dist.PrefixStore(f"drivetrain/{name}", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]


def _wait_until_all_joined(patience: timedelta) -> None:
    """Wait for all ranks: one that returned at once would close connections that another is still opening."""
    store = group_store("joined")
    store.set(str(dist.get_rank()), "")
    store.wait([str(rank) for rank in range(dist.get_world_size())], patience)
