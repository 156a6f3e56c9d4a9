"""The device that this process trains on: which GPU is this rank's, and which is CUDA's current one."""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from .. import machine
from ..errors import StrategyError

_LAUNCHERS = (
    ("SLURM_LOCALID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALRANKID", "PMI_SIZE"),
)
"""Where Slurm, Open MPI, and Intel MPI and MPICH give a process its number on its machine, and the number of all."""


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context inside which `device` is CUDA's current device; nothing for the CPU.

    Streams, events and kernels of Triton that name no device are of the current one.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def pick_device(device: str | None, local_rank: int | None = 0) -> torch.device:
    """Return the device to train on: the named one, else CUDA where there is any, else the CPU.

    A CUDA device without an index gets `local_rank` as its index.

    Args:
        device: `"cpu"`, `"cuda"`, `"cuda:1"` or None.
        local_rank: the rank's number on its machine; None where it is not known.

    Raises:
        StrategyError: if the name means nothing, the device is not here, or the index is not known.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise StrategyError(f"device={device!r} is not a torch device; use 'cpu' or 'cuda'.") from error
    if named.type not in ("cpu", "cuda"):
        raise StrategyError(f"device={device!r} is not supported; use 'cpu' or 'cuda'.")
    if named.type == "cpu":
        return torch.device("cpu")
    index = local_rank if named.index is None else named.index
    here = torch.cuda.device_count()
    if here == 0:
        raise StrategyError(
            f"device={device!r} needs a GPU, and torch sees none here; use device='cpu', or leave device out."
        )
    if index is None:
        raise StrategyError(
            f"device={device!r}: this process is one of several ranks and sees {here} GPUs, and nothing gives its "
            f"number on this machine. Set LOCAL_RANK (torchrun, Slurm and MPI do), or let each rank see one GPU only "
            f"(CUDA_VISIBLE_DEVICES)."
        )
    if index >= here:
        raise StrategyError(
            f"device={device!r} means CUDA device {index}, and this process sees {here}; "
            f"use fewer devices, or device='cpu'."
        )
    return torch.device("cuda", index)


def local_rank(rank: int = 0, ranks: int = 1) -> int | None:
    """Return this rank's number on its machine, None if nothing gives it.

    `LOCAL_RANK` counts first. What Slurm and MPI set counts only if they have started all ranks: a shell inside a
    Slurm job has Slurm's variables, too, and so has each process that is started from it.

    Args:
        rank, ranks: of the process group; 0 and 1 without one.

    Raises:
        StrategyError: if the variable is not a number.
    """
    if "LOCAL_RANK" in os.environ:
        return _number("LOCAL_RANK")
    if ranks == 1:
        return 0
    for name, total in _LAUNCHERS:
        if name in os.environ and os.environ.get(total) in (None, str(ranks)):
            return _number(name)
    one_machine = machine.local_ranks(0) == ranks or os.environ.get("SLURM_NNODES") == "1"
    return rank if one_machine else None


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise StrategyError(f"{name}={text!r} must be this rank's number on its machine: 0, 1, 2, ….")
    return int(text)


def rank_device(device: str | None) -> torch.device:
    """Return this rank's device: the GPU of its number on its machine, or the only one that it sees.

    A launcher may show each rank one GPU (Slurm's `--gpus-per-task=1`); that is `cuda:0` in each of them.

    Args:
        device: `"cpu"`, `"cuda"` or None; see `pick_device`.

    Raises:
        StrategyError: as `pick_device`.
    """
    grouped = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    return pick_device(device, 0 if ranks > 1 and torch.cuda.device_count() == 1 else local_rank(rank, ranks))


def _fingerprint(device: torch.device) -> int:
    """Return a number that two ranks have in common if, and only if, they have one GPU."""
    identity = f"rank {dist.get_rank()}"
    # Parts of one GPU (MIG) may share its identity, and torches before 2.5 give none.
    if "MIG" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        identity = str(getattr(torch.cuda.get_device_properties(device), "uuid", identity))
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7])


def refuse_shared_gpu(device: torch.device) -> None:
    """Raise StrategyError on all ranks if two of them have one GPU; all ranks must call it.

    NCCL would fail later, without naming the cause. Only ranks that see one GPU can meet there, and only a group
    that serves CPU tensors is asked: the GPUs cannot talk to each other yet.
    """
    if device.type != "cuda" or not dist.is_initialized() or "cpu" not in str(dist.get_backend_config()):
        return
    fingerprints = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(fingerprints, torch.tensor(_fingerprint(device), dtype=torch.int64))
    owners: dict[int, int] = {}
    for rank, each in enumerate(int(each) for each in fingerprints):
        first = owners.setdefault(each, rank)
        if first != rank:  # also on ranks with a GPU of their own, which would wait for these two
            raise StrategyError(
                f"Ranks {first} and {rank} have the same GPU. Start as many ranks on a machine as it has GPUs, or show "
                f"each rank one of its own (CUDA_VISIBLE_DEVICES)."
            )
