"""Create small data sets for `stages.py`: `data.py pictures COUNT FOLDER`, `data.py small COUNT FOLDER`.

pictures: JPEGs of 256 × 256 pixels in one folder per class, from enlarged CIFAR-10 images, for the loader benchmark
without `--photos`. small: train.beton and val.beton of random images, for rehearsals.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
from drivetrain.loaders import convert
from drivetrain.loaders.datasets.cifar10 import CLASSES, fetch_cifar10, load_cifar10
from PIL import Image


def pictures(count: int, folder: Path) -> None:
    """Write the first images of CIFAR-10's test split as JPEGs."""
    images, labels = load_cifar10(fetch_cifar10(), "test")
    for number, (image, label) in enumerate(zip(images[:count], labels, strict=False)):
        path = folder / CLASSES[label] / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)


def small(count: int, folder: Path) -> None:
    """Write random images as two .beton files."""
    folder.mkdir(parents=True)
    for name in ("train", "val"):
        random = np.random.default_rng(len(name))
        images = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        convert((images, np.arange(count) % 10), folder / f"{name}.beton", classes=CLASSES, progress=False)


if __name__ == "__main__":
    what, number, out = sys.argv[1:]
    target, fresh = Path(out), Path(f"{out}.new")
    shutil.rmtree(fresh, ignore_errors=True)  # left by a killed call
    {"pictures": pictures, "small": small}[what](int(number), fresh)
    fresh.replace(target)
