"""Pack CIFAR-10 losslessly into two thirds of its size: each official file as one WebP picture of all its images.

Every unpacked file has the MD5 of the official one (`loaders/datasets/cifar10.py`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from drivetrain.common.errors import DataError
from drivetrain.loaders.datasets.cifar10 import CLASSES, META, ROW
from drivetrain.loaders.datasets.names import cifar10
from PIL import Image

SIDE = 32
COLUMNS = 100
"""Images per row of a picture, which is padded with black; the format allows 16,383 pixels per side."""


def pack(source: Path, out: Path, part_bytes: int) -> None:
    """Write a picture and a file of labels for each `.bin` file in `source`.

    Args:
        source: a folder that `fetch_cifar10` returned, so that its files are the official ones.
        out: the folder to write to; created if missing.
        part_bytes: the maximum size of a file.

    Raises:
        DataError: if a file cannot be read, or a picture is too large.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in cifar10.MD5S:
        try:
            rows = np.fromfile(source / name, np.uint8).reshape(-1, ROW)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{source / name} is not a file of CIFAR-10: {error}. Create it with fetch_cifar10()."
            ) from error
        picture = out / f"{name}.webp"
        Image.fromarray(mosaic(rows[:, 1:])).save(picture, lossless=True, quality=75, method=4)
        (out / f"{name}.labels").write_bytes(rows[:, 0].tobytes())
        if picture.stat().st_size > part_bytes:
            raise DataError(f"{picture} has {picture.stat().st_size:,} bytes, more than part_bytes={part_bytes:,}.")


def mosaic(pixels: np.ndarray) -> np.ndarray:
    """Return images, (N, 3072) as in a `.bin` file, as one picture (H, W, 3) of rows of `COLUMNS` images."""
    full = np.zeros((-(-len(pixels) // COLUMNS) * COLUMNS, pixels.shape[1]), np.uint8)
    full[: len(pixels)] = pixels
    images = full.reshape(-1, COLUMNS, 3, SIDE, SIDE)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 4, 2)).reshape(-1, COLUMNS * SIDE, 3)


def unpack(source: Path, out: Path) -> None:
    """Write the official files that `pack` was given, and `batches.meta.txt`, into `out`.

    Raises:
        DataError: if a part is missing, or the result is not the official file; then no file of that name is written.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, expected in cifar10.MD5S.items():
        data = restored(source, name)
        if hashlib.md5(data, usedforsecurity=False).hexdigest() != expected:
            raise DataError(f"{name}, unpacked from {source}, is not the official file. Copy its parts again.")
        fresh = out / f".{name}.new"
        fresh.write_bytes(data)
        fresh.replace(out / name)
    (out / META).write_text("\n".join(CLASSES) + "\n")


def restored(source: Path, name: str) -> bytes:
    """Return a `.bin` file's content.

    Raises:
        DataError: if the picture or the labels cannot be read, or do not fit.
    """
    try:
        labels = np.fromfile(source / f"{name}.labels", np.uint8)
        with Image.open(source / f"{name}.webp", formats=["WEBP"]) as image:
            picture = np.asarray(image.convert("RGB"))
        images = picture.reshape(-1, SIDE, COLUMNS, SIDE, 3).transpose(0, 2, 4, 1, 3)
        rows = np.concatenate([labels[:, None], images.reshape(-1, ROW - 1)[: len(labels)]], axis=1)
    except (OSError, ValueError) as error:
        raise DataError(f"{source} does not hold {name} as it was packed: {error}. Copy its parts again.") from error
    return rows.tobytes()
