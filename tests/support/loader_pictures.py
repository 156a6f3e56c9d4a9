"""Small pictures and `.beton` files for the tests of `loaders/`, made from seeds."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drivetrain.loaders import TorchLoader, convert
from numpy.typing import NDArray
from PIL import Image


def picture(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    """A smooth colour picture `(H, W, 3)`: waves of random direction, so that JPEG keeps it well."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    channels = []
    for _ in range(3):
        waves = [
            np.sin(2 * np.pi * (rng.uniform(-3, 3) * x + rng.uniform(-3, 3) * y) + rng.uniform(0, 6.3))
            for _ in range(3)
        ]
        channels.append(127.5 + 42 * sum(waves))
    return np.stack(channels, axis=2).clip(0, 255).astype(np.uint8)


def jpeg_bytes(pixels: NDArray[np.uint8], **options: Any) -> bytes:
    """Return a JPEG file of them; `options` are Pillow's, with a default quality of 92.

    Huffman tables are optimised, so that `convert` copies it, except where Pillow's buffer does not suffice for that.
    """
    buffer, optimize = io.BytesIO(), options.get("quality", 92) < 95
    Image.fromarray(pixels).save(buffer, "JPEG", **{"quality": 92, "optimize": optimize, **options})
    return buffer.getvalue()


def jpeg_folder(root: Path, per_class: int = 6, classes: tuple[str, ...] = ("ant", "bee", "cat")) -> Path:
    """A folder CLASS/NUMBER.jpg of pictures of several sizes."""
    sizes = [(72, 96), (96, 72), (80, 80), (70, 110)]
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            seed = label * 1000 + number
            data = jpeg_bytes(picture(seed, *sizes[seed % 4]))
            (root / name / f"{number:03}.jpg").write_bytes(data)
    return root


def raw_pictures(count: int, side: int = 12) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pictures `(N, side, side, 3)` that are stored raw, and labels that number them."""
    images = np.stack([picture(seed, side, side) for seed in range(count)])
    return images, np.arange(count)


def raw_beton(path: Path, count: int, side: int = 12) -> Path:
    """A `.beton` of them; the label of each sample is its number."""
    convert(raw_pictures(count, side), path, progress=False)
    return path


def jpeg_beton(path: Path, per_class: int = 6) -> Path:
    """A `.beton` of JPEG files of several sizes, in three classes."""
    convert(jpeg_folder(path.parent / f"{path.stem}-images", per_class), path, progress=False)
    return path


def run_python(
    code: str, *arguments: Any, timeout: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter, in the tests' folder."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


def load(kind: Any, path: Path, **options: Any) -> torch.Tensor:
    """All images of an epoch by a loader of this kind, in the file's order, uint8, 24 pixels wide."""
    base = {"batch_size": 4, "image_size": 24, "order": "sequential", "dtype": torch.uint8}
    with kind(path, **{**base, "workers": 0 if kind is TorchLoader else 2, **options}) as loader:
        return torch.cat([images for images, _ in loader])
