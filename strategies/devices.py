"""The device that this process trains on: this rank's GPU, and CUDA's current device."""

import hashlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ..common import machine
from ..common.errors import StrategyError

_LAUNCHERS = (
    ("SLURM_LOCALID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALRANKID", "PMI_SIZE"),
)
"""Variables in which Slurm, Open MPI, and Intel MPI and MPICH set a process's local rank, and the world size."""


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` CUDA's current one, which streams, events and Triton kernels use; nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait_for(device: torch.device) -> None:
    """Wait until the device has computed what it was given; nothing for the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pick_device(device: str | None, local_rank: int | None = 0) -> torch.device:
    """Return the device to train on: the given one, else CUDA if available, else the CPU. A CUDA device without an
    index gets `local_rank` as its index, which is None if unknown."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError) as error:  # of a text, of another object
        raise StrategyError(f"device={device!r:.80} is not a torch device. Use 'cpu' or 'cuda'.") from error
    if named.type not in ("cpu", "cuda"):
        raise StrategyError(f"device={device!r} is not supported. Use 'cpu' or 'cuda'.")
    if named.type == "cpu":
        return torch.device("cpu")
    index = local_rank if named.index is None else named.index
    here = torch.cuda.device_count()
    if here == 0:
        raise StrategyError(
            f"device={device!r} needs a GPU, but torch finds none here. Set device='cpu', or leave device out."
        )
    if index is None:
        raise StrategyError(
            f"device={device!r}: this process is one of several ranks and sees {here} GPUs, but its local rank is "
            f"unknown. Set LOCAL_RANK (torchrun, Slurm and MPI do), or make a single GPU visible to each rank "
            f"(CUDA_VISIBLE_DEVICES)."
        )
    if index >= here:
        raise StrategyError(
            f"device={device!r} means CUDA device {index}, but this process sees {here}. "
            f"Use fewer devices, or device='cpu'."
        )
    return torch.device("cuda", index)


def local_rank(rank: int = 0, ranks: int = 1) -> int | None:
    """Return this rank's index on its machine, None if it is unknown. The variables of Slurm and MPI count only if
    these have started all `ranks`: a shell inside a Slurm job has them too, and so has each process started from it."""
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
        raise StrategyError(f"{name}={text!r} must be this process's local rank: 0, 1, 2, ….")
    return int(text)


def rank_device(device: str | None, place: tuple[int, int] | None = None) -> torch.device:
    """Return this rank's device: the GPU with its local rank as index, or the only visible one, as with Slurm's
    `--gpus-per-task=1`. `place` is rank and world size, by default those of the process group."""
    grouped = dist.is_available() and dist.is_initialized()
    rank, ranks = place or ((dist.get_rank(), dist.get_world_size()) if grouped else (0, 1))
    return pick_device(device, 0 if ranks > 1 and torch.cuda.device_count() == 1 else local_rank(rank, ranks))


def _fingerprint(device: torch.device) -> int:
    identity = f"rank {dist.get_rank()}"
    if "MIG" not in os.environ.get("CUDA_VISIBLE_DEVICES", ""):  # slices of one GPU may share its identity
        identity = str(torch.cuda.get_device_properties(device).uuid)
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7])


def refuse_shared_gpu(device: torch.device) -> None:
    """Raise `StrategyError` on all ranks if two of them use the same GPU: NCCL would fail later, without naming the
    cause. All ranks must call it, in a group that supports CPU tensors: the GPUs cannot communicate yet."""
    if device.type != "cuda" or not dist.is_initialized() or "cpu" not in str(dist.get_backend_config()):
        return
    fingerprints = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(fingerprints, torch.tensor(_fingerprint(device), dtype=torch.int64))
    owners: dict[int, int] = {}
    for rank, each in enumerate(int(each) for each in fingerprints):
        first = owners.setdefault(each, rank)
        if first != rank:  # also on ranks with their own GPU, which would wait for these two
            raise StrategyError(
                f"Ranks {first} and {rank} use the same GPU. Start as many ranks on a machine as it has GPUs, or make "
                f"a different one visible to each rank (CUDA_VISIBLE_DEVICES)."
            )
