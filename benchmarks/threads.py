"""Measure the loader's time per image with 1 to 16 threads: small raw images, and photographs.

    python benchmarks/threads.py FOLDER|--synthetic [--rounds 7] [--workers 1 2 4 8 16] [--images 20000]

FOLDER is an ImageFolder tree of JPEGs; `--synthetic` makes photographs of 500 × 375 pixels instead. Small images are
32 and 64 pixels wide, in small and in large batches: there, what a thread spends per chunk of a batch is most visible.
All are loaded as for training: small ones with padded crops, photographs with RandomResizedCrop (0.25, 1) to 224; flip,
normalized float32.

The time that an image takes shrinks until every core has a thread. Its CPU time, that of the process, must not grow
with the number of threads: what it grows by is overhead. All numbers of threads are interleaved in each round, and the
ratios to the first are taken round by round. Writes results/threads.json.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from drivetrain.common.table import Table
from drivetrain.loaders import FFCVLoader, convert
from measuring import Contender, measure, save, summarize
from numpy.typing import NDArray
from PIL import Image


@dataclass(frozen=True)
class Load:
    """A file, and how it is loaded."""

    path: Path
    options: dict[str, Any]

    def epochs(self, workers: int, cpu: list[float]) -> Contender:
        """Return a contender that measures microseconds per image of one epoch, and adds those of the CPU to `cpu`."""
        loader = FFCVLoader(self.path, workers=workers, **self.options)

        def epoch() -> float:
            wall, own = perf_counter(), process_time()
            count = sum(len(images) for images, _ in loader)
            cpu.append(1e6 * (process_time() - own) / count)
            return 1e6 * (perf_counter() - wall) / count

        return epoch


def smooth(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Return a picture of coarse colors and fine noise, about as large as a photograph when it is compressed."""
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    fine = rng.normal(0, 8, (height, width, 3))
    blurred = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    return np.clip(blurred + fine, 0, 255).astype(np.uint8)


def write_photographs(folder: Path, count: int) -> Path:
    """Write JPEGs of 500 × 375 pixels to one class."""
    rng = np.random.default_rng(0)
    (folder / "class").mkdir(parents=True)
    for number in range(count):
        file = io.BytesIO()
        Image.fromarray(smooth(rng, 375, 500)).save(file, "JPEG", quality=90)
        (folder / "class" / f"{number:04}.jpg").write_bytes(file.getvalue())
    return folder


def loads(scratch: Path, photos: Path, images: int) -> dict[str, Load]:
    """Return what is loaded, by name."""
    rng = np.random.default_rng(0)
    made: dict[str, Load] = {}
    for side, batches in ((32, (128, 1024)), (64, (128, 512))):
        count, path = images * 32 // side, scratch / f"{side}.beton"
        pixels = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
        convert((pixels, np.arange(count) % 10), path, progress=False)
        for batch in batches:
            options = {"batch_size": batch, "image_size": side, "crop": "padded"}
            made[f"{side} pixels, batch {batch}"] = Load(path, options)
    path = scratch / "photos.beton"
    print(convert(photos, path, progress=False))
    for batch in (64, 256):
        made[f"photographs, batch {batch}"] = Load(path, {"batch_size": batch, "image_size": 224})
    return made


def results(name: str, wall: dict[int, list[float]], cpu: dict[int, list[float]]) -> tuple[Table, Any]:
    """Return table and JSON of the microseconds per image, by number of threads."""
    first = next(iter(wall))
    rows, cells = {}, []
    for workers, own in wall.items():
        figures = {
            "us_per_image": summarize(own),
            "cpu_us_per_image": summarize(cpu[workers]),
            "cpu_over_first": summarize([a / b for a, b in zip(cpu[workers], cpu[first], strict=True)]),
        }
        rows[str(workers)] = figures
        cells.append((str(workers), *(_shown(figure) for figure in figures.values())))
    heads = (name, "µs per image", "CPU µs per image", f"CPU time over {first}")
    return Table(heads, cells, caption="by number of threads; medians and quartiles"), rows


def _shown(figure: dict[str, Any]) -> str:
    digits = 2 if figure["median"] < 100 else 0
    median, low, high = (f"{figure[key]:,.{digits}f}" for key in ("median", "low", "high"))
    return f"{median}  ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("folder", type=Path, nargs="?")
    source.add_argument("--synthetic", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--images", type=int, default=20_000, help="of 32 pixels; half as many of 64")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    tables: list[Table] = []
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        photos = write_photographs(scratch / "photos", 512) if options.synthetic else options.folder
        for name, load in loads(scratch, photos, options.images).items():
            cpu: dict[int, list[float]] = {workers: [] for workers in options.workers}
            contenders = {str(workers): load.epochs(workers, cpu[workers]) for workers in options.workers}
            wall = measure(contenders, options.rounds)
            counted = {workers: figures[-options.rounds :] for workers, figures in cpu.items()}
            table, rows[name] = results(name, {workers: wall[str(workers)] for workers in options.workers}, counted)
            tables.append(table)
    save(tables, rows, options.out / "threads.json")


if __name__ == "__main__":
    main()
