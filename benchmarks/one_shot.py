"""Measure what needs a fresh process: starting a loader, and converting a folder. Prints JSON.

    python benchmarks/one_shot.py start ours|stock FILE.beton WORKERS     seconds to a first batch, twice
    python benchmarks/one_shot.py convert ours|quick|stock FOLDER OUT WORKERS   seconds

Imports are not timed: both sides import torch and FFCV. The time to convert includes starting FFCV's workers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

SIDE, BATCH = 224, 64


def our_loader(path: Path, workers: int) -> Any:
    """Return an `FFCVLoader`: RandomResizedCrop (0.25, 1) to 224, flip, normalized float32."""
    from drivetrain.loaders import FFCVLoader

    return FFCVLoader(path, batch_size=BATCH, image_size=SIDE, workers=workers)


def stock_loader(path: Path, workers: int) -> Any:
    """Return FFCV's own loader with the same operations."""
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
    return Loader(
        str(path), batch_size=BATCH, num_workers=workers, order=OrderOption.RANDOM, seed=0, drop_last=False,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor(), Squeeze(1)]},
    )  # fmt: skip


LOADERS: dict[str, Callable[[Path, int], Any]] = {"ours": our_loader, "stock": stock_loader}


def start(kind: str, path: Path, workers: int) -> list[float]:
    """Return the seconds until the first batch, of a loader and of a second one with the same pipeline."""
    import ffcv.fields.decoders
    import ffcv.loader
    import ffcv.transforms  # noqa: F401

    times = []
    for _ in range(2):
        begin = perf_counter()
        loader = LOADERS[kind](path, workers)
        next(iter(loader))
        times.append(perf_counter() - begin)
    return times


def convert(kind: str, folder: Path, out: Path, workers: int) -> float:
    """Return the seconds to convert a folder.

    "ours" and "quick" (which checks only each JPEG's ends) use `drivetrain.loaders.convert`, "stock" uses FFCV's
    DatasetWriter as in its documentation.
    """
    if kind != "stock":
        from drivetrain.loaders import convert as ours
        from drivetrain.loaders.native.library import library

        library()
        begin = perf_counter()
        check: Any = "structure" if kind == "quick" else "decode"
        ours(folder, out, workers=workers, check=check, progress=False)
        return perf_counter() - begin
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    begin = perf_counter()
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
    DatasetWriter(str(out), fields, num_workers=workers).from_indexed_dataset(ImageFolder(str(folder)))
    return perf_counter() - begin


if __name__ == "__main__":
    task, kind, *paths, workers = sys.argv[1:]
    work: Any = start if task == "start" else convert
    print(json.dumps(work(kind, *map(Path, paths), int(workers))))
