"""Trials of one format: loading from memory, and reading from disk."""

from __future__ import annotations

import itertools
import os
from contextlib import closing
from time import perf_counter

import numpy as np

from ...common.threads import in_order
from ..ffcv_loader import FFCVLoader
from ..image_size import ImageSize
from .sample import Converted

_WARM = 6
"""Batches that are loaded before the clock starts: as many as the loader allocates."""

_TIMED = 8
"""Batches with the clock running, at least."""

_SMALLEST = 4
"""Images per batch, at least."""

_PROBED = 4
"""Images that are looked for in memory after they should have left it."""


def loading_rate(
    file: Converted, image_size: ImageSize, workers: int, expected: float, seconds: float, epoch: int
) -> float:
    """Return the images per second of a loader, measured for about `seconds`, without its first batches. `expected` is
    about how many images per second it loads; 0 for the shortest trial."""
    images = expected * seconds
    batch = int(np.clip(images / (_WARM + _TIMED), _SMALLEST, max(16 * workers, 32)))
    batches = max(round(images / batch), _WARM + _TIMED)
    samples = np.resize(np.arange(len(file.sizes)), batch * batches)
    with FFCVLoader(
        file.path, batch_size=batch, image_size=image_size, workers=workers, indices=samples,
        rank=0, world_size=1,
    ) as loader:  # fmt: skip
        loader.set_epoch(epoch)
        start = perf_counter()
        for number, _ in enumerate(loader, 1):
            if number == _WARM:
                start = perf_counter()
    return batch * (batches - _WARM) / (perf_counter() - start)


def disk_rate(file: Converted, threads: int, seconds: float, seed: int) -> float | None:
    """Return the images per second that threads read from disk, one by one in random order, within about `seconds`.
    Each thread reads at least one. None if the system does not drop a file from memory, or does not report whether it
    has done so: then it cannot be measured."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return None  # macOS
    places = list(zip(file.pointers.tolist(), file.sizes.tolist(), strict=True))
    order = np.random.default_rng(seed).permutation(len(places)).tolist()
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no other images in advance
        if any(_in_memory(descriptor, places[number][0]) for number in order[:_PROBED]):
            return None
        start, numbers = perf_counter(), itertools.count()

        def read() -> int:
            done = 0
            while (number := next(numbers)) < len(order):
                pointer, size = places[order[number]]
                os.pread(descriptor, size, pointer)
                done += 1
                if perf_counter() >= start + seconds:
                    break
            return done

        with closing(in_order(lambda _: read(), range(threads), threads, "drivetrain-read")) as counts:
            images = sum(counts)
        return images / (perf_counter() - start)
    finally:
        os.close(descriptor)


def _in_memory(descriptor: int, place: int) -> bool:
    """Return whether a byte of a file is in memory; True if the file system cannot tell."""
    try:
        os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
