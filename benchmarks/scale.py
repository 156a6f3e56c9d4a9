"""Measure what one of ten thousand ranks pays for a data set of up to a billion samples.

    python benchmarks/scale.py [--rounds 5] [--most 1000000000] [--ranks 10000] [--out …]

The files are made here: the tables of a shard are written in full, the pixels are a hole of 100 kB a sample, which
reads as zeros, and the shards are links to one file, so that a few hundred MB of disk are enough. Each round is a
process of its own that opens the data with `FFCVLoader`, computes the order of an epoch, and loads a first batch.
Memory is the highest, above what it was before. A hundred thousand files are opened by one process of a machine, which
is measured once; the others take what it has found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, process_time
from typing import Any
from zlib import crc32

import numpy as np
import psutil
import torch
from drivetrain.common.table import Table
from drivetrain.loaders import FFCVLoader
from drivetrain.loaders.beton import layout
from drivetrain.loaders.beton.data_set import MOST_OPEN
from drivetrain.loaders.beton.manifest import Blocks, manifest_path, seal, write_manifest
from measuring import save, summarize

SHARD = 1_000_000  # samples of a file, at most; of as many files as are needed
MANY = 100_000  # files of the last case
LINKS = 50_000  # to one file, which file systems limit
PAGE, EACH, SIDE = 1 << 23, 100_000, 8  # bytes of a page and of a sample's place, pixels of an image's side
FIELDS = [layout.Field("image", "rgb_image"), layout.Field("label", "int")]
SHOWN = {
    "opening seconds": 2, "opening cpu_seconds": 2, "opening megabytes": 0, "order seconds": 3, "order cpu_seconds": 3,
    "order megabytes": 1, "first batch seconds": 2,
}  # fmt: skip


def write_shard(path: Path, samples: int) -> None:
    """Write a file of black raw images of 8 × 8 pixels, whose tables are complete, and its manifest."""
    numbers = np.arange(samples)
    start = -(-(layout.tables_end(samples, FIELDS) + layout.SEAL_BYTES) // PAGE) * PAGE
    per_page = PAGE // EACH
    places = start + numbers // per_page * PAGE + numbers % per_page * EACH
    rows = np.zeros(samples, layout.metadata_dtype(FIELDS))
    rows["f0"]["mode"], rows["f0"]["width"], rows["f0"]["height"] = layout.MODE_RAW, SIDE, SIDE
    rows["f0"]["data_ptr"], rows["f1"] = places, numbers % 1000
    table = np.zeros(samples, layout.ALLOCATION)
    table["sample_id"], table["ptr"], table["size"] = numbers, places, SIDE * SIDE * 3
    end = start + (int(numbers[-1]) // per_page + 1) * PAGE
    header = np.array([(layout.VERSION, len(FIELDS), PAGE, samples, end)], dtype=layout.HEADER)
    head = header.tobytes() + np.stack([field.descriptor() for field in FIELDS]).tobytes()
    checksums = numbers.astype(np.uint32)
    tables = crc32(head + rows.tobytes() + table.tobytes())
    digest = seal(tables, checksums)
    with path.open("wb") as file:
        file.write(head + rows.tobytes() + digest)
        file.seek(end)
        file.write(table.tobytes())
    with manifest_path(path).open("wb") as file:
        about = {
            "format": "beton 2", "samples": samples, "fields": {field.name: field.kind for field in FIELDS},
            "page_size": PAGE, "classes": [f"class {number}" for number in range(1000)], "tables_crc32": tables,
            "seal": digest.hex(), "blocks": Blocks.of(head, rows, table, checksums).to_json(digest),
        }  # fmt: skip
        write_manifest(file, about, checksums)


def write_shards(folder: Path, samples: int, files: int) -> str:
    """Write the files as links to one, and return the pattern that names them."""
    digits = len(str(files - 1))
    for number in range(files):
        shard = folder / f"shard-{number // LINKS}.beton"
        if not shard.exists():
            write_shard(shard, samples // files)
        for path in (shard, manifest_path(shard)):
            os.link(path, folder / path.name.replace(shard.stem, f"{number:0{digits}}"))
    return str(folder / f"{{{0:0{digits}}..{files - 1}}}.beton") if files > 1 else str(folder / "0.beton")


@dataclass
class Cost:
    """What a part of the work takes: seconds by the clock and of the processor, and MB of memory at its highest."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    megabytes: float = 0.0


@contextmanager
def highest(figure: Callable[[], int]) -> Iterator[list[int]]:
    """Sample a figure of this process every 2 ms. After the block, its highest value is the only one in the list."""
    most, done = [figure()], Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], figure())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()
        most[0] = max(most[0], figure())


@contextmanager
def cost() -> Iterator[Cost]:
    """Measure the block."""
    found, own = Cost(), psutil.Process()
    before = own.memory_info().rss
    with highest(lambda: own.memory_info().rss) as most:
        start, started = perf_counter(), process_time()
        yield found
        found.seconds, found.cpu_seconds = perf_counter() - start, process_time() - started
    found.megabytes = (most[0] - before) / 1e6


def open_last(pattern: str, batch: int, ranks: int, **options: Any) -> FFCVLoader:
    """Return the loader of the last rank, with `batch` samples of each batch."""
    return FFCVLoader(
        pattern, batch_size=batch * ranks, image_size=SIDE, workers=1, dtype=torch.uint8, rank=ranks - 1,
        world_size=ranks, crop="whole", batches_ahead=1, **options,
    )  # fmt: skip


def compute_order(loader: FFCVLoader, batch: int) -> None:
    """Compute which samples of an epoch the rank loads."""
    count = sum(len(share) for share in loader.shares(1))
    assert count == len(loader) * batch


def answer_of(command: list[str], **environment: str) -> dict[str, float]:
    """Run a command, and return the JSON in the last line that it prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | environment)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def inside(pattern: str, batch: int, ranks: int) -> dict[str, float]:
    """Measure, in a process of its own."""
    with cost() as opening:
        loader = open_last(pattern, batch, ranks)
    with cost() as order:
        compute_order(loader, batch)
    with cost() as first_batch:
        next(iter(loader))
    loader.close()
    parts = {"opening": opening, "order": order, "first batch": first_batch}
    return {f"{part} {name}": value for part, own in parts.items() for name, value in vars(own).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=10**9)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(inside(asked.inside[0], int(asked.inside[1]), asked.ranks)))
        return
    sizes = [size for size in (10**power for power in range(5, 10)) if size <= asked.most]
    cases = [(size, max(size // SHARD, 1)) for size in sizes] + [(asked.most, min(MANY, asked.most // 100))]
    rows, cells = dict[str, object](), []
    for samples, files in cases:
        batch = min(64, samples // asked.ranks)
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            pattern = write_shards(Path(scratch), samples, files)
            again = [sys.executable, __file__, "--inside", pattern, str(batch), "--ranks", str(asked.ranks)]
            times = {"": 1, ", each other rank": asked.rounds} if files > MOST_OPEN else {"": asked.rounds}
            figures = {rank: [answer_of(again, TMPDIR=scratch) for _ in range(n)] for rank, n in times.items()}
        for rank, measured in figures.items():
            row = {name: summarize([each[name] for each in measured]) for name in measured[0]}
            rows[f"{samples:,} in {files:,}{rank}"] = {"samples": samples, "files": files, "batch": batch, **row}
            medians = (f"{row[name]['median']:,.{digits}f}" for name, digits in SHOWN.items())
            cells.append((f"{samples:,}", f"{files:,}{rank}", *medians))
    heads = ("samples", "files", "opening s", "CPU s", "MB", "order s", "CPU s", "MB", "first batch s")
    save([Table(heads, cells)], {"ranks": asked.ranks, "scale": rows}, asked.out / "scale.json")


if __name__ == "__main__":
    main()
