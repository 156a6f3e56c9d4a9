"""DeepSpeed itself: imported on use, with its logging reduced and its global changes reverted."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from functools import cache, wraps
from typing import Any

import torch

from ...common.errors import require
from ..devices import local_rank, pick_device


@contextmanager
def import_deepspeed(device: torch.device) -> Iterator[Any]:
    """Import DeepSpeed inside the block, to prepare an engine on `device`.

    On exit, environment variables and DeepSpeed's global switches are restored. DeepSpeed's choice of the accelerator
    is kept, because engines query it all the time: a process has one kind of device.
    """
    with _environment_kept():
        os.environ["DS_ACCELERATOR"] = device.type  # else it uses CUDA if available, also for "cpu"
        # It requires one, even in a group that no launcher started, and uses it as the index of the GPU.
        os.environ["LOCAL_RANK"] = str(local_rank() or 0 if device.index is None else device.index)
        deepspeed: Any = require("deepspeed", "deepspeed", "shard a training run with ZeRO")
        _choose_accelerator(deepspeed, device)
        _import_muon()
        logger = logging.getLogger("DeepSpeed")
        logger.addFilter(_should_log)
        operations, autocast = deepspeed.ops.__compatible_ops__, deepspeed.runtime.torch_autocast
        before = dict(operations), autocast.TORCH_AUTOCAST_INITIALIZED
        # An all-reduce for inference, which it would compile, and announce on standard output.
        operations["deepspeed_shm_comm"] = False
        try:
            yield deepspeed
        finally:
            operations.update(before[0])
            autocast.TORCH_AUTOCAST_INITIALIZED = before[1]  # one engine in bf16 would change the next
            logger.removeFilter(_should_log)


def reason_without_aio() -> str:
    """Return why DeepSpeed cannot read and write NVMe here, with the remedy; empty if it can."""
    # DeepSpeed's own check takes seconds: run it only if the library to compile with is installed.
    if find_library("aio") is not None:
        with import_deepspeed(pick_device(None)) as deepspeed:
            builder = deepspeed.accelerator.get_accelerator().create_op_builder("AsyncIOBuilder")
            if builder is not None and builder.is_compatible(verbose=False):
                return ""
    return "DeepSpeed's async_io cannot be compiled here. Install a C++ compiler, ninja and libaio-dev"


def _import_muon() -> None:
    """Import DeepSpeed's Muon, which every `initialize` does, such that it is compiled only when it is first called.

    Otherwise the import itself sets up `torch.compile`, which takes each rank 2 s, whatever the optimizer.
    """
    name = "deepspeed.runtime.zero.muon.original_muon"
    compiler: Any = sys.modules.get("deepspeed.runtime.compiler")
    if name in sys.modules or not hasattr(compiler, "compile"):
        return
    original = compiler.compile
    compiler.compile = _deferred(original)
    try:
        with suppress(ImportError):  # versions without it
            importlib.import_module(name)
    finally:
        compiler.compile = original


def _deferred(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory of decorators like `compile_`, which they call when the decorated function is first called."""

    def factory(*options: Any, **named: Any) -> Callable[..., Any]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @cache
            def compiled() -> Callable[..., Any]:
                result: Callable[..., Any] = compile_(*options, **named)(function)
                return result

            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return compiled()(*args, **kwargs)

            return call

        return decorate

    return factory


def _choose_accelerator(deepspeed: Any, device: torch.device) -> None:
    chosen = deepspeed.accelerator.real_accelerator
    if chosen.get_accelerator().device_name().split(":")[0] != device.type:
        chosen.ds_accelerator = None
        chosen.get_accelerator()


def _should_log(record: logging.LogRecord) -> bool:
    """Drop two warnings about what is intended: an optimizer of torch, and autocast around the engine."""
    message = str(record.msg)
    return "untested optimizer" not in message and "torch.autocast is" not in message


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
