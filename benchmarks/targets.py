"""Measure what several views, and masks that move with the image, cost beside loading images alone.

    python benchmarks/targets.py FOLDER [--rounds 7] [--workers 2] [--out benchmarks/results]

FOLDER is an ImageFolder tree of JPEGs. Crops are to 224 pixels, flipped and normalized. Of views, the unit is views/s:
two views of each sample from one decoding, against loading each sample twice, as a loader without views does.
The masks are made: 21 classes in blobs, as large as the images; plain PyTorch moves the same ones with torchvision's v2
transforms. Ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from drivetrain.loaders import FFCVLoader, TorchLoader, convert
from drivetrain.loaders.conversion.folders import FolderSource
from measuring import Contender, compare, measure, save
from numpy.typing import NDArray
from one_shot import BATCH, SIDE
from PIL import Image, ImageDraw

CLASSES, BLOBS = 21, 12
MULTI_CROP: tuple[dict[str, Any], ...] = (
    {"count": 2, "scale": (0.4, 1.0)},
    {"count": 4, "image_size": 96, "scale": (0.05, 0.4)},
)


def epochs_of(loader: Any, views: int = 1) -> Contender:
    """Return a contender that measures views/s (images/s, with one view) of an epoch."""

    def epoch() -> float:
        start = perf_counter()
        count = sum(len(labels) for _, labels in loader)
        return views * count / (perf_counter() - start)

    return epoch


def blobs(seed: int, width: int, height: int) -> NDArray[np.uint8]:
    """Return a mask `(H, W)` of ellipses of random classes."""
    rng = np.random.default_rng(seed)
    image = Image.new("L", (width, height))
    draw = ImageDraw.Draw(image)
    for _ in range(BLOBS):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        across, down = rng.uniform(0.05, 0.25, 2) * (width, height)
        draw.ellipse((x - across, y - down, x + across, y + down), fill=int(rng.integers(1, CLASSES)))
    return np.asarray(image)


class Masked:
    """The images of a folder, as files' bytes, each with a mask."""

    def __init__(self, folder: Path) -> None:
        self.files = [Path(path) for path, _ in FolderSource(folder).listed()]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[bytes, NDArray[np.uint8]]:
        with Image.open(self.files[index]) as image:
            turned = image.getexif().get(0x0112, 1) > 4
            width, height = image.size[::-1] if turned else image.size
        return self.files[index].read_bytes(), blobs(index, width, height)


def views(path: Path, workers: int, rounds: int, low: float) -> Any:
    """Measure views/s with random crops of `low` to all of the area."""
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "image_size": SIDE,
        "workers": workers,
        "scale": (low, 1.0),
    }
    contenders = {
        "two views of one decoding": epochs_of(FFCVLoader(path, views=2, **options), 2),
        "two loads": epochs_of(FFCVLoader(path, **options)),
        "four views of one decoding": epochs_of(FFCVLoader(path, views=4, **options), 4),
    }
    return compare(f"views of ({low:g}, 1)", "views/s", measure(contenders, rounds), "two views of one decoding")


def multi_crop(path: Path, workers: int, rounds: int) -> Any:
    """Measure samples/s of two views at 224 and four at 96 pixels, from one decoding and from six."""
    options: dict[str, Any] = {"batch_size": BATCH, "workers": workers}
    large = FFCVLoader(path, image_size=SIDE, scale=MULTI_CROP[0]["scale"], **options)
    small = FFCVLoader(path, image_size=96, scale=MULTI_CROP[1]["scale"], **options)

    def six_loads() -> float:
        start, count = perf_counter(), 0
        for loader, times in ((large, 2), (small, 4)):
            for _ in range(times):
                count += sum(len(labels) for _, labels in loader)
        return count / 6 / (perf_counter() - start)

    one = FFCVLoader(path, image_size=SIDE, views=MULTI_CROP, **options)
    contenders: dict[str, Contender] = {"one decoding": epochs_of(one), "six loads": six_loads}
    return compare("multi-crop", "samples/s", measure(contenders, rounds), "one decoding")


def masks(plain: Path, masked: Path, workers: int, rounds: int) -> Any:
    """Measure images/s with masks and without."""
    options: dict[str, Any] = {"batch_size": BATCH, "image_size": SIDE, "workers": workers}
    contenders = {
        "images and masks": epochs_of(FFCVLoader(masked, **options)),
        "images alone": epochs_of(FFCVLoader(plain, **options)),
        "plain PyTorch, images and masks": epochs_of(TorchLoader(masked, **options)),
    }
    return compare("masks", "images/s", measure(contenders, rounds), "images and masks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    given, rounds = arguments.workers, arguments.rounds
    with tempfile.TemporaryDirectory() as scratch:
        plain, masked = Path(scratch, "plain.beton"), Path(scratch, "masked.beton")
        convert(arguments.folder, plain, progress=False)
        report = convert(Masked(arguments.folder), masked, progress=False)
        parts = {
            "views_25": views(plain, given, rounds, 0.25),
            "views_8": views(plain, given, rounds, 0.08),
            "multi_crop": multi_crop(plain, given, rounds),
            "masks": masks(plain, masked, given, rounds),
        }
    about = {"images": report.samples, "workers": given, "batch_size": BATCH}
    results = {name: figures for name, (_, figures) in parts.items()}
    save([table for table, _ in parts.values()], {**about, **results}, arguments.out / "targets.json")


if __name__ == "__main__":
    main()
