"""Switches of torch that choose how a GPU computes: set for one run, and put back after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ...transforms import ProgressiveResizing, Transform
from .config import DistributedConfig
from .kinds import find


def uses_gpu(how: DistributedConfig) -> bool:
    """Return whether the strategy trains on CUDA here."""
    return torch.cuda.is_available() if how.device is None else torch.device(how.device).type == "cuda"


def choose_benchmark(how: DistributedConfig, transforms: Sequence[Transform]) -> tuple[bool, str]:
    """Return whether cuDNN tries its algorithms at the first batch of each size, and the reason.

    It is worth it where images keep their size, which all batches of a pipeline do but for ProgressiveResizing's.
    A process that asks torch for deterministic algorithms gets no benchmark, for it may choose others each time.
    """
    chosen = how.cudnn_benchmark
    if chosen is not None:
        return chosen, "as set"
    if torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
        return False, "torch is set to deterministic algorithms, and a benchmark may choose others each time"
    if find(transforms, ProgressiveResizing):
        return False, "ProgressiveResizing changes the size of the images, and each size would be measured"
    return True, "images keep their size, so that the fastest convolutions are measured once"


@contextmanager
def cuda_settings(how: DistributedConfig, transforms: Sequence[Transform]) -> Iterator[None]:
    """Inside it torch's switches are those of the pipeline; after it as before, also after an error.

    Without a GPU nothing is touched: the precision of float32 matmuls concerns some CPUs, too.
    """
    if not uses_gpu(how):
        yield
        return
    with ExitStack() as stack:
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark, _ = choose_benchmark(how, transforms)
        if how.matmul_precision is not None:
            for undo in _matmul_switches():
                stack.callback(undo)
            _set_matmul_precision(how.matmul_precision)
        yield


def _new_switches() -> list[Any]:
    """Return the places of the precision in torch from 2.9 on; older torches have none."""
    places: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return [place for place in places if hasattr(place, "fp32_precision")]


def _matmul_switches() -> list[Callable[[], None]]:
    """Return what puts the precision back as it is now; to be called in the reverse order."""
    undo: list[Callable[[], None]] = [
        partial(setattr, place, "fp32_precision", place.fp32_precision) for place in _new_switches()
    ]
    before = _old_precision()
    if before is not None:
        # The newer switches, which go back first, follow the older one, whose value they would be without a trace.
        undo.append(partial(torch.set_float32_matmul_precision, before))
    return undo


def _old_precision() -> str | None:
    """Return `torch.get_float32_matmul_precision()`; None in a process that has used torch's newer switches, which
    torch then refuses to read through the older one."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def matmul_precision() -> str:
    """Return the precision of float32 matrix products that torch is set to now."""
    return _old_precision() or str(torch.backends.cuda.matmul.fp32_precision)


def _set_matmul_precision(precision: str) -> None:
    if _old_precision() is not None:
        torch.set_float32_matmul_precision(precision)
        return
    torch.backends.cuda.matmul.fp32_precision = "ieee" if precision == "highest" else "tf32"
