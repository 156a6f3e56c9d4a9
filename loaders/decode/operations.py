"""Additional FFCV operations in a loader's pipeline, made deterministic: each receives one image at a time, after
numba's random numbers, which FFCV does not seed, are seeded for that (seed, epoch, sample)."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import torch
from numpy.typing import NDArray

from ...common.errors import DataError
from .ffcv_modules import ffcv_module

_OURS = {
    "ToTensor", "ToDevice", "ToTorchImage", "NormalizeImage", "Convert", "Squeeze", "View",
    "ModuleWrapper", "SimpleRGBImageDecoder", "RandomResizedCropRGBImageDecoder", "CenterCropRGBImageDecoder",
}  # fmt: skip
_MIXING = {"ImageMixup", "LabelMixup", "MixupToOneHot"}


@nb.njit(nogil=True)
def _run(code: Any, images: Any, spare: Any, seeds: Any) -> None:
    for i in range(len(images)):
        random.seed(seeds[i])
        np.random.seed(seeds[i])  # noqa: NPY002 — numba's generator of this thread, which FFCV's code uses
        images[i : i + 1] = code(images[i : i + 1], spare)


@nb.njit(nogil=True)
def _run_with_indices(code: Any, images: Any, spare: Any, seeds: Any, indices: Any) -> None:
    for i in range(len(images)):
        random.seed(seeds[i])
        np.random.seed(seeds[i])  # noqa: NPY002
        images[i : i + 1] = code(images[i : i + 1], spare, indices[i : i + 1])


def seeds_of(keys: NDArray[np.uint64], place: int) -> NDArray[np.int64]:
    """Return the seeds `(n,)`, 32 bits, of the operation at `place` for samples with these `keys`."""
    mixed = keys + np.uint64(place // 4 * 0x9E3779B97F4A7C15 % 2**64)  # four shifts of a key are four seeds
    return ((mixed >> np.uint64(8 * (place % 4))) & np.uint64(0xFFFFFFFF)).astype(np.int64)


class Operations:
    """FFCV operations on uint8 images `(n, H, W, 3)`, compiled when the loader is created. Each must map uint8 images
    to uint8 images of the same `size`. It receives a batch of one, so operations that mix samples are rejected."""

    def __init__(self, operations: Sequence[Any], size: tuple[int, int]) -> None:
        self._steps = [_compile(operation, size) for operation in operations]
        # Run once now, to raise errors early; in a thread, because it seeds that thread's random numbers.
        probe = np.zeros((1, *size, 3), dtype=np.uint8)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.apply, probe, np.zeros(1, np.uint64), np.zeros(1, np.int64)).result()

    def apply(self, images: NDArray[np.uint8], keys: NDArray[np.uint64], indices: NDArray[np.int64]) -> None:
        """Apply all of them in place to `images` `(n, H, W, 3)`; `keys` as `draws.sample_keys`."""
        for place, step in enumerate(self._steps):
            seeds = seeds_of(keys, place)
            spare = np.empty(step.spare_shape, dtype=step.spare_dtype)
            try:
                if step.with_indices:
                    _run_with_indices(step.code, images, spare, seeds, indices)
                else:
                    _run(step.code, images, spare, seeds)
            except Exception as error:  # the operation's own code may raise anything
                raise DataError(
                    f"The operation {step.name} failed: {type(error).__name__}: {error}. It receives uint8 images of "
                    f"shape {images[:1].shape}, one at a time."
                ) from error


@dataclass(frozen=True)
class _Step:
    name: str
    code: Any
    with_indices: bool  # whether it also takes those of the samples
    spare_shape: tuple[int, ...]
    spare_dtype: Any


def _compile(operation: Any, size: tuple[int, int]) -> _Step:
    operation_class = ffcv_module("ffcv.pipeline.operation").Operation
    state_class = ffcv_module("ffcv.pipeline.state").State
    name = type(operation).__name__
    if not isinstance(operation, operation_class):
        raise DataError(f"operations= contains {operation!r:.80}, which is not an FFCV operation.")
    if name in _OURS:
        raise DataError(f"The loader already does the work of {name}. Remove it from operations=.")
    if name in _MIXING:
        raise DataError(
            f"The operation {name} mixes the samples of a batch, but each is loaded separately. Mix them in the "
            "training loop (drivetrain.transforms)."
        )
    image, levels = (*size, 3), np.dtype(np.uint8)
    before = state_class(jit_mode=True, device=torch.device("cpu"), dtype=levels, shape=image)
    after, memory = operation.declare_state_and_memory(before)
    if tuple(after.shape) != image or np.dtype(after.dtype) != levels or not after.jit_mode:
        raise DataError(
            f"The operation {name} returns {after.dtype} of shape {tuple(after.shape)}. Use one that returns uint8 of "
            f"{image} and is compiled (jit_mode)."
        )
    code = operation.generate_code()
    shape, dtype = (image, levels) if memory is None else (tuple(memory.shape), memory.dtype)
    with_indices = bool(getattr(code, "with_indices", False))
    return _Step(name, nb.njit(nogil=True)(code), with_indices, (1, *shape), dtype)
