"""This process's place among the ranks: torchrun's environment, and joining the process group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether torchrun (or something that sets the same variables) started this process."""
    return all(name in os.environ for name in _TORCHRUN)


def local_rank() -> int:
    """This rank's number on this machine; 0 outside any launch."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def join_group(init_method: str = "env://") -> None:
    """Joins the process group that RANK and WORLD_SIZE describe, and takes this rank's CUDA device.

    Gloo serves CPU tensors and, where there is CUDA, NCCL serves CUDA tensors.
    """
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        # CPU-only jobs may run more ranks than there are GPUs.
        if local_rank() < torch.cuda.device_count():
            torch.cuda.set_device(local_rank())
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
