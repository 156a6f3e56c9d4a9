"""Measure how near loading raw images comes to the machine's memory bandwidth.

    python benchmarks/raw_bandwidth.py [--images 4000] [--rounds 9] [--workers 2] [--batch 64]

A file of raw 256 × 256 images, in the system's page cache, is loaded as uint8 and as float32: whole, as random crops of
224 pixels, and as resized crops. What counts is the bytes that no loader can avoid: an image's stored ones, which are
read, and the batch's, which are written. Two limits are measured in the same rounds, with as many threads: `memcpy`
between two arrays larger than any cache, counting the bytes read and written; and `pread` of each sample. The ratios to
`memcpy` are taken round by round. Writes results/raw_bandwidth.json.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from drivetrain.common.table import Table
from drivetrain.loaders import FFCVLoader, convert, open_beton
from measuring import Contender, measure, save, summarize
from numpy.typing import NDArray

SIDE, CROP = 256, 224
STORED = 3 * SIDE * SIDE
PIECE = 1 << 22  # bytes of an array that a thread copies at a time
MEMCPY = "memcpy"
LOADERS: dict[str, dict[str, Any]] = {
    "whole, uint8": {"crop": "whole", "image_size": SIDE, "flip": False, "dtype": torch.uint8},
    "whole": {"crop": "whole", "image_size": SIDE, "flip": False},
    "random crop, flip, uint8": {"crop": "random", "image_size": CROP, "dtype": torch.uint8},
    "random crop, flip": {"crop": "random", "image_size": CROP},
    "resized crop, flip, uint8": {"image_size": CROP, "dtype": torch.uint8},
    "resized crop, flip": {"image_size": CROP},
}


class Noise:
    """Random images, and labels; each is made when it is used."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        rng = np.random.default_rng(index)
        return rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8), index % 10


def bytes_of(options: dict[str, Any]) -> int:
    """Return the bytes that an image takes to read and to write."""
    side, dtype = options["image_size"], options.get("dtype", torch.float32)
    return STORED + 3 * side * side * int(dtype.itemsize)


def loading(path: Path, workers: int, batch: int, options: dict[str, Any]) -> Contender:
    """Return a contender that measures the GB/s of one epoch."""
    loader = FFCVLoader(path, batch_size=batch, workers=workers, **options)

    def epoch() -> float:
        start = perf_counter()
        count = sum(len(images) for images, _ in loader)
        return count * bytes_of(options) / (perf_counter() - start) / 1e9

    return epoch


def copying(pool: ThreadPoolExecutor, size: int) -> Contender:
    """Return a contender that measures the GB/s, read and written, of copying `size` bytes."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def copy(at: int) -> None:
        target[at : at + PIECE] = source[at : at + PIECE]

    def run() -> float:
        start = perf_counter()
        list(pool.map(copy, range(0, size, PIECE)))
        return 2 * size / (perf_counter() - start) / 1e9

    return run


def reading(pool: ThreadPoolExecutor, path: Path, workers: int) -> Contender:
    """Return a contender that measures the GB/s, read and written, of reading each sample to one place in memory."""
    pointers = open_beton(path).pointers.tolist()

    def read(share: list[int]) -> None:
        buffer = bytearray(STORED)
        descriptor = os.open(path, os.O_RDONLY)
        for pointer in share:
            assert os.preadv(descriptor, [buffer], pointer) == STORED
        os.close(descriptor)

    def run() -> float:
        start = perf_counter()
        list(pool.map(read, (pointers[first::workers] for first in range(workers))))
        return 2 * len(pointers) * STORED / (perf_counter() - start) / 1e9

    return run


def rows_of(figures: dict[str, list[float]]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield each contender's line of the table, and its JSON."""
    for name, values in figures.items():
        own = summarize(values)
        ratio = summarize([a / b for a, b in zip(values, figures[MEMCPY], strict=True)])
        each = bytes_of(LOADERS[name]) if name in LOADERS else 2 * STORED
        images = 1e9 * own["median"] / each
        cells = (
            name, f"{images:,.0f}", f"{each / 1000:,.0f}",
            f"{own['median']:.1f}  ({own['low']:.1f} to {own['high']:.1f})",
            f"{ratio['median']:.0%}  ({ratio['low']:.0%} to {ratio['high']:.0%})",
        )  # fmt: skip
        yield cells, {"gb_per_s": own, "bytes_per_image": each, "images_per_s": images, "of_memcpy": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.workers) as pool:
        path = Path(directory) / "raw.beton"
        print(convert(Noise(options.images), path, write_mode="raw", progress=False))
        load = partial(loading, path, options.workers, options.batch)
        contenders = {
            **{name: load(chosen) for name, chosen in LOADERS.items()},
            "pread": reading(pool, path, options.workers),
            MEMCPY: copying(pool, options.images * STORED),
        }
        lines, rows = zip(*rows_of(measure(contenders, options.rounds)), strict=True)
    heads = (f"raw, {options.workers} threads", "images/s", "kB per image", "GB/s", f"of {MEMCPY}")
    results = dict(zip(contenders, rows, strict=True))
    save([Table(heads, list(lines))], {"contenders": results}, options.out / "raw_bandwidth.json")


if __name__ == "__main__":
    main()
