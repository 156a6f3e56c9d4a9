"""DeepSpeed itself: imported at use, kept quiet, and what it changes around it put back."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from typing import Any

import torch

from ...errors import require
from ..devices import local_rank, pick_device


@contextmanager
def working(device: torch.device) -> Iterator[Any]:
    """DeepSpeed, for the preparation of an engine on `device`.

    After the block, environment variables and DeepSpeed's own global switches are as before; DeepSpeed's choice of
    the accelerator stays, because engines ask for it all the time: a process has one kind of device.

    Raises:
        MissingExtra: if it is not installed.
    """
    with _environment_kept():
        os.environ["DS_ACCELERATOR"] = device.type  # else it takes CUDA where there is any, also for "cpu"
        # It wants one, also in a group that no launcher started, and takes it for the index of the GPU.
        os.environ["LOCAL_RANK"] = str(local_rank() or 0 if device.index is None else device.index)
        deepspeed: Any = require("deepspeed", "deepspeed", "divide a training with ZeRO")
        _choose_accelerator(deepspeed, device)
        logger = logging.getLogger("DeepSpeed")
        logger.addFilter(_is_news)
        operations, autocast = deepspeed.ops.__compatible_ops__, deepspeed.runtime.torch_autocast
        before = dict(operations), autocast.TORCH_AUTOCAST_INITIALIZED
        # An all-reduce for inference, which it would compile, and say so on standard output.
        operations["deepspeed_shm_comm"] = False
        try:
            yield deepspeed
        finally:
            operations.update(before[0])
            autocast.TORCH_AUTOCAST_INITIALIZED = before[1]  # one engine in bf16 would change the next
            logger.removeFilter(_is_news)


def reason_without_aio() -> str:
    """Why DeepSpeed cannot read and write NVMe here, with the remedy; empty if it can.

    Raises:
        MissingExtra: if DeepSpeed is not installed.
    """
    # DeepSpeed's own question costs seconds: asked only where there is a library to be compiled with.
    if find_library("aio") is not None:
        with working(pick_device(None)) as deepspeed:
            builder = deepspeed.accelerator.get_accelerator().create_op_builder("AsyncIOBuilder")
            if builder is not None and builder.is_compatible(verbose=False):
                return ""
    return "DeepSpeed's async_io cannot be compiled here; install a C++ compiler, ninja and libaio-dev"


def _choose_accelerator(deepspeed: Any, device: torch.device) -> None:
    chosen = deepspeed.accelerator.real_accelerator
    if chosen.get_accelerator().device_name().split(":")[0] != device.type:
        chosen.ds_accelerator = None
        chosen.get_accelerator()


def _is_news(record: logging.LogRecord) -> bool:
    """Without two warnings of what was asked for: an optimizer of torch, and autocast around the engine."""
    message = str(record.msg)
    return "untested optimizer" not in message and "torch.autocast is" not in message


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Environment variables that change inside the block are as before after it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
