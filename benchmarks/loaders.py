"""Measure the speed of stage one: loading, starting, converting and opening, against plain PyTorch and stock FFCV.

    python benchmarks/loaders.py FOLDER [--rounds 7] [--workers 2] [--only loading …] [--out benchmarks/results]

FOLDER is an ImageFolder tree of JPEGs. All loaders do RandomResizedCrop (0.25, 1) to 224, flip and normalization, with
the same number of workers; PyTorch reads the files, the others the `.beton` converted from them. The script prints
medians, quartiles and ratios taken round by round, and writes JSON. The floor is the time that no loader of full JPEGs
can beat: their entropy decoding on all cores, and nothing else. With a GPU, our loaders are also timed with batches on
it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from drivetrain.common.table import Table
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, open_beton
from drivetrain.loaders.beton.layout import ALLOCATION, HEADER, MODE_RAW, Field, metadata_dtype, tables_start
from drivetrain.loaders.beton.manifest import manifest_path, seal, tables_checksum, write_manifest
from drivetrain.loaders.native.library import MESSAGE, library
from measuring import Contender, compare, measure, save
from one_shot import BATCH, SIDE, our_loader, stock_loader

MILLION = 1_000_000
PARTS = ("starting", "converting", "opening", "loading")


def epochs_of(loader: Any) -> Contender:
    """Return a contender that measures images/s of one epoch, on a GPU until the last batch has arrived."""

    def epoch() -> float:
        start = perf_counter()
        count = sum(len(images) for images, _ in loader)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return count / (perf_counter() - start)

    return epoch


def decoding(path: Path, workers: int, share: int) -> Contender:
    """Return a contender that measures images/s of decoding each JPEG at 1/`share` of its size, in `workers` threads.

    1/8 is entropy decoding alone.
    """
    beton, pool, core = open_beton(path), ThreadPoolExecutor(workers), library()

    def decode(i: int) -> bool:
        stored, message = beton.stored(i), ctypes.create_string_buffer(MESSAGE)
        size = int(beton.heights[i]), int(beton.widths[i])
        return int(core.dt_jpeg_check(stored, len(stored), *size, share, None, message)) == 0

    def epoch() -> float:
        start = perf_counter()
        assert all(pool.map(decode, range(len(beton))))
        return len(beton) / (perf_counter() - start)

    return epoch


def loading(folder: Path, path: Path, workers: int, rounds: int) -> tuple[Table, dict[str, Any]]:
    """Measure images/s of the loaders, and of decoding alone, their limit."""
    threads = torch.get_num_threads()
    options: dict[str, Any] = {"batch_size": BATCH, "image_size": SIDE, "workers": workers}
    contenders = {
        "FFCVLoader": epochs_of(our_loader(path, workers)),
        "FFCVLoader, verify=True": epochs_of(FFCVLoader(path, verify=True, **options)),
        "FFCVLoader, bfloat16": epochs_of(FFCVLoader(path, dtype=torch.bfloat16, **options)),
        "FFCVLoader, uint8": epochs_of(FFCVLoader(path, dtype=torch.uint8, **options)),
        "FFCVLoader, image_size 128": epochs_of(FFCVLoader(path, **{**options, "image_size": 128})),
        "stock FFCV": epochs_of(stock_loader(path, workers)),
        "PyTorch ImageFolder": epochs_of(TorchLoader(folder, **options)),
        "floor: decoding alone": decoding(path, workers, 1),
        "floor: entropy decoding alone": decoding(path, workers, 8),
    }
    if torch.cuda.is_available():
        contenders["FFCVLoader, on the GPU"] = epochs_of(FFCVLoader(path, device="cuda", **options))
        contenders["PyTorch ImageFolder, on the GPU"] = epochs_of(TorchLoader(folder, device="cuda", **options))
    figures = measure(contenders, rounds)
    torch.set_num_threads(threads)  # stock FFCV changes it
    return compare("loading", "images/s", figures, "FFCVLoader")


def one_shot(task: str, kind: str, *arguments: Any) -> Callable[[], Any]:
    """Return a function that runs a task of `one_shot.py` in a fresh process."""
    script = Path(__file__).with_name("one_shot.py")

    def run() -> Any:
        command = [sys.executable, str(script), task, kind, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    return run


def starting(path: Path, workers: int, rounds: int) -> tuple[Table, dict[str, Any]]:
    """Measure the seconds to the first batch in a fresh process, and to that of a second loader."""
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        for kind, name in (("ours", "FFCVLoader"), ("stock", "stock FFCV")):
            first, second = one_shot("start", kind, path, workers)()
            figures.setdefault(f"{name}, first batch", []).append(first)
            figures.setdefault(f"{name}, a second loader's", []).append(second)
    return compare("starting", "s", figures, "FFCVLoader, first batch")


def linked(folder: Path, out: Path, copies: int) -> Path:
    """Return a folder with `copies` links to each image: for a small one, the start of the workers would dominate."""
    for file in sorted(folder.rglob("*.*")):
        for copy in range(copies):
            link = out / file.parent.name / f"{copy}-{file.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
    return out


def converting(folder: Path, scratch: Path, workers: int, rounds: int) -> tuple[Table, dict[str, Any]]:
    """Measure the seconds to convert five copies of the folder, each time in a fresh process."""
    folder = linked(folder, scratch / "images", 5)
    contenders = {
        "drivetrain convert": one_shot("convert", "ours", folder, scratch / "ours.beton", workers),
        "drivetrain convert, check=structure": one_shot("convert", "quick", folder, scratch / "quick.beton", workers),
        "FFCV's DatasetWriter": one_shot("convert", "stock", folder, scratch / "stock.beton", workers),
    }
    return compare("converting", "s", measure(contenders, rounds, warm_up=0), "drivetrain convert")


def million_samples(path: Path) -> None:
    """Write a file of a million raw images of 16 × 16 pixels, with only its tables written, and its manifest."""
    fields = [Field("image", "rgb_image"), Field("label", "int")]
    rows = np.zeros(MILLION, dtype=metadata_dtype(fields))
    page, size, places = 1 << 23, 16 * 16 * 3, np.arange(MILLION)
    pointers = (1 << 28) + places // (page // size) * page + places % (page // size) * size
    rows["f0"]["mode"], rows["f0"]["width"], rows["f0"]["height"] = MODE_RAW, 16, 16
    rows["f0"]["data_ptr"], rows["f1"] = pointers, places % 1000
    table = np.zeros(MILLION, dtype=ALLOCATION)
    table["sample_id"], table["ptr"], table["size"] = places, pointers, size
    end = int(pointers[-1]) + size
    with path.open("wb") as file:
        file.write(np.array([(2, 2, page, MILLION, end)], dtype=HEADER).tobytes())
        file.write(np.stack([field.descriptor() for field in fields]).tobytes() + rows.tobytes())
        file.seek(end)
        file.write(table.tobytes())
    checksums = np.random.default_rng(0).integers(0, 1 << 32, MILLION).astype(np.uint32)
    crc = tables_checksum(np.memmap(path, dtype=np.uint8, mode="r"), MILLION, fields, end)
    digest = seal(crc, checksums)
    with path.open("r+b") as file:
        file.seek(tables_start(len(fields)) + rows.nbytes)
        file.write(digest)
    about = {
        "samples": MILLION,
        "fields": {field.name: field.kind for field in fields},
        "classes": [f"class {number}" for number in range(1000)],
        "tables_crc32": crc,
        "seal": digest.hex(),
    }
    with manifest_path(path).open("wb") as file:
        write_manifest(file, about, checksums)


def opening(scratch: Path, rounds: int) -> tuple[Table, dict[str, Any]]:
    """Measure the seconds to open and validate a file of a million samples, with and without its manifest."""
    path = scratch / "million.beton"
    million_samples(path)

    def seconds() -> float:
        start = perf_counter()
        assert len(open_beton(path)) == MILLION
        return perf_counter() - start

    with_manifest = measure({"with": seconds}, rounds)["with"]
    manifest_path(path).unlink()
    without = measure({"without": seconds}, rounds)["without"]
    figures = {"with its manifest of checksums": with_manifest, "alone": without}
    return compare("opening a million samples", "s", figures, "alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    few = max(options.rounds // 2, 1)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        path = scratch / "photos.beton"
        print(convert(options.folder, path, workers=options.workers))
        works = {
            "starting": lambda: starting(path, options.workers, few),
            "converting": lambda: converting(options.folder, scratch, options.workers, few),
            "opening": lambda: opening(scratch, few),
            "loading": lambda: loading(options.folder, path, options.workers, options.rounds),
        }
        parts = {name: works[name]() for name in PARTS if name in options.only}
    tables = [table for table, _ in parts.values()]
    save(tables, {name: rows for name, (_, rows) in parts.items()}, options.out / "loaders.json")


if __name__ == "__main__":
    main()
