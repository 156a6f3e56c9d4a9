"""torch's global settings of GPU computation, set for one run and restored after it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ...common.matmul import old_precision
from ...transforms import Transform
from .config import DistributedConfig


def uses_gpu(how: DistributedConfig) -> bool:
    return torch.cuda.is_available() if how.device is None else torch.device(how.device).type == "cuda"


def choose_benchmark(how: DistributedConfig, transforms: Sequence[Transform]) -> tuple[bool, str]:
    """Return whether cuDNN benchmarks at the first batch of each size, and the reason."""
    chosen = how.cudnn_benchmark
    if chosen is not None:
        return chosen, "as set"
    if torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
        why = "torch is set to deterministic algorithms, and a benchmark may select others in each run"
        return False, why
    for transform in transforms:
        if transform.changes_image_size:
            return False, f"{transform.known_as} changes the image size, and each size would be benchmarked"
    return True, "all images have one size, so convolutions are benchmarked once"


@contextmanager
def cuda_settings(how: DistributedConfig, transforms: Sequence[Transform]) -> Iterator[None]:
    """Without a GPU nothing changes: the precision of float32 matmuls would affect some CPUs, too."""
    if not uses_gpu(how):
        yield
        return
    with ExitStack() as stack:
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark, _ = choose_benchmark(how, transforms)
        if how.matmul_precision is not None:
            _restore_matmul_precision(stack)
            if old_precision() is not None:
                torch.set_float32_matmul_precision(how.matmul_precision)
            else:
                precision = "ieee" if how.matmul_precision == "highest" else "tf32"
                torch.backends.cuda.matmul.fp32_precision = precision
        yield


def _restore_matmul_precision(stack: ExitStack) -> None:
    backends: Any = torch.backends
    for owner in (backends.cuda.matmul, backends.mkldnn.matmul):
        stack.callback(setattr, owner, "fp32_precision", owner.fp32_precision)
    if (before := old_precision()) is not None:
        # Setting the older switch also sets the newer ones, so it is restored first: it is last on the stack.
        stack.callback(torch.set_float32_matmul_precision, before)
