"""Loading speed of `FFCVLoader` against plain PyTorch and stock FFCV, interleaved in one run.

    python benchmarks/loaders.py FOLDER [--rounds 5] [--workers 2] [--out benchmarks/results]

FOLDER is an ImageFolder tree. All loaders do RandomResizedCrop (0.25, 1) to 224, flip and normalisation, with
the same number of workers; PyTorch reads the files, the other two the `.beton` made of them. Prints a table of
images/s (median and quartiles) and ratios taken round by round; writes JSON. The floor is what no loader can
beat: each JPEG decoded once by libjpeg-turbo on every core, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from drivetrain.loaders import FFCVLoader, TorchLoader, convert, libffcv, open_beton
from drivetrain.pipeline.provenance import provenance
from rich.console import Console
from rich.table import Table

SIDE, BATCH = 224, 64
Epoch = Callable[[], int]
"""Runs one epoch and gives the number of images."""


def ours(path: Path, workers: int) -> Epoch:
    """`FFCVLoader`, float32 normalised."""
    loader = FFCVLoader(path, batch_size=BATCH, image_size=SIDE, workers=workers)
    return lambda: sum(len(images) for images, _ in loader)


def pytorch(folder: Path, workers: int) -> Epoch:
    """torchvision's ImageFolder in a DataLoader."""
    loader = TorchLoader(folder, batch_size=BATCH, image_size=SIDE, workers=workers)
    return lambda: sum(len(images) for images, _ in loader)


def stock_ffcv(path: Path, workers: int) -> Epoch:
    """FFCV's own loader with the same operations."""
    libffcv.library()
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

    mean, std = np.array([0.485, 0.456, 0.406]) * 255, np.array([0.229, 0.224, 0.225]) * 255
    image = [
        RandomResizedCropRGBImageDecoder((SIDE, SIDE), scale=(0.25, 1.0)),
        RandomHorizontalFlip(),
        NormalizeImage(mean, std, np.float32),
        ToTensor(),
        ToTorchImage(),
    ]
    loader = Loader(
        str(path), batch_size=BATCH, num_workers=workers, order=OrderOption.RANDOM, seed=0, drop_last=False,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor(), Squeeze(1)]},
    )  # fmt: skip
    return lambda: sum(len(images) for images, _ in loader)


def decoding(path: Path, workers: int) -> Epoch:
    """The floor: every JPEG decoded once, in as many threads."""
    beton = open_beton(path)
    chosen = [i for i in range(len(beton)) if beton.modes[i] == 0]
    pool = ThreadPoolExecutor(workers)

    def decode(i: int) -> bool:
        start, size = int(beton.pointers[i]), int(beton.sizes[i])
        return libffcv.decodes(
            beton.data[start : start + size].tobytes(), int(beton.widths[i]), int(beton.heights[i])
        )

    return lambda: sum(pool.map(decode, chosen))


def measure(contenders: dict[str, Epoch], rounds: int) -> dict[str, list[float]]:
    """images/s of each contender in each round; a warm-up round is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, epoch in contenders.items():
            start = perf_counter()
            images = epoch()
            if number:
                speeds[name].append(images / (perf_counter() - start))
    return speeds


def summarise(values: list[float]) -> dict[str, float]:
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return {"median": median, "low": low, "high": high, "n": len(values)}


def report(speeds: dict[str, list[float]]) -> tuple[Table, dict[str, Any]]:
    """The table and the JSON of the same figures; ratios are ours over the other, round by round."""
    table = Table("loader", "images/s", "quartiles", "FFCVLoader is … × this")
    rows: dict[str, Any] = {}
    for name, values in speeds.items():
        own = summarise(values)
        ratio = summarise([a / b for a, b in zip(speeds["FFCVLoader"], values, strict=True)])
        rows[name] = {"images_per_s": own, "ours_over_this": ratio}
        table.add_row(
            name, f"{own['median']:,.0f}", f"{own['low']:,.0f} to {own['high']:,.0f}",
            f"{ratio['median']:.2f}  ({ratio['low']:.2f} to {ratio['high']:.2f})",
        )  # fmt: skip
    return table, rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "photos.beton"
        print(convert(options.folder, path, workers=options.workers))
        contenders = {
            "FFCVLoader": ours(path, options.workers),
            "stock FFCV": stock_ffcv(path, options.workers),
            "PyTorch ImageFolder": pytorch(options.folder, options.workers),
            "floor: decoding alone": decoding(path, options.workers),
        }
        speeds = measure(contenders, options.rounds)
    torch.set_num_threads(threads)  # stock FFCV sets it
    table, rows = report(speeds)
    Console().print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    written = options.out / "loaders.json"
    written.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1))
    print(written)


if __name__ == "__main__":
    main()
