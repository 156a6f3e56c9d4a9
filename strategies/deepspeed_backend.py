"""DeepSpeed itself: imported at use, kept quiet, and what it changes around it put back."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import require
from .group import local_rank


def load(device: str = "cpu") -> ModuleType:
    """DeepSpeed, imported; for `"cpu"` or `"cuda"`.

    Raises:
        MissingExtra: if it is not installed.
    """
    with _environment({"DS_ACCELERATOR": device}):
        deepspeed = require("deepspeed", "deepspeed", "train with ZeRO")
        accelerator = require("deepspeed.accelerator", "deepspeed", "train with ZeRO")
        if accelerator.get_accelerator().device_name().split(":")[0] != device:
            accelerator.real_accelerator.ds_accelerator = None
            accelerator.get_accelerator()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: torch.device
) -> Any:
    """DeepSpeed's engine of `model`."""
    deepspeed = load(device.type)
    with _environment({"LOCAL_RANK": str(local_rank())}):
        return deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )[0]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables inside the block, put back after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
