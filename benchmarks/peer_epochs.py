"""One peer's loader, in an environment without Drivetrain; `peers.py` starts it.

    python benchmarks/peer_epochs.py dali|torchcodec|torchvision FOLDER SCALE WORKERS

For each line on stdin it runs an epoch over the folder (RandomResizedCrop (SCALE, 1) to 224, flip, normalised float32)
and prints images/s. The first line printed has the versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

SIDE, BATCH = 224, 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PACKAGES = ("torch", "torchvision", "torchcodec", "nvidia-dali-cuda120")


def dali(folder: str, scale: float, workers: int) -> Callable[[], Iterator[int]]:
    """DALI on a CPU: `fn.decoders.image_random_crop`, which decodes the region only."""
    from nvidia.dali import fn, pipeline_def, types

    files = sorted(str(path) for path in Path(folder).rglob("*.jp*g"))

    def graph() -> Any:
        jpegs, labels = fn.readers.file(files=files, random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            jpegs, device="cpu", random_area=[scale, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(images, resize_x=SIDE, resize_y=SIDE, interp_type=types.INTERP_TRIANGULAR)
        images = fn.crop_mirror_normalize(
            images, mirror=fn.random.coin_flip(), dtype=types.FLOAT, output_layout="HWC",
            mean=[255 * level for level in MEAN], std=[255 * level for level in STD],
        )  # fmt: skip
        return images, labels

    options = {"batch_size": BATCH, "num_threads": workers, "device_id": None, "prefetch_queue_depth": 3}
    pipe = pipeline_def(**options)(graph)()
    pipe.build()

    def epoch() -> Iterator[int]:
        for _ in range(len(files) // BATCH):
            images, _ = pipe.run()
            yield len(images)

    return epoch


def of_torch(folder: str, scale: float, workers: int, loader: Any) -> Callable[[], Iterator[int]]:
    """torchvision's ImageFolder with transforms v2 in a DataLoader."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [
        v2.ToImage(), v2.RandomResizedCrop(SIDE, scale=(scale, 1.0)), v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
    ]  # fmt: skip
    options = {} if loader is None else {"loader": loader}
    if loader is None:  # Pillow's images are cropped before they become tensors, which is faster
        steps[:2] = [v2.RandomResizedCrop(SIDE, scale=(scale, 1.0)), v2.ToImage()]
    data = ImageFolder(folder, v2.Compose(steps), **options)
    batches = DataLoader(
        data,
        BATCH,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
        prefetch_factor=3,
    )

    def epoch() -> Iterator[int]:
        for images, _ in batches:
            yield len(images)

    return epoch


def torchcodec(folder: str, scale: float, workers: int) -> Callable[[], Iterator[int]]:
    """TorchCodec's decoder of images, and transforms v2 on tensors."""
    from torchcodec.decoders import decode_image

    return of_torch(folder, scale, workers, lambda path: decode_image(path))


def torchvision(folder: str, scale: float, workers: int) -> Callable[[], Iterator[int]]:
    """Pillow, and transforms v2."""
    return of_torch(folder, scale, workers, None)


PEERS = {"dali": dali, "torchcodec": torchcodec, "torchvision": torchvision}


def version(package: str) -> str | None:
    """Return an installed package's version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    name, folder, scale, workers = sys.argv[1:]
    epoch = PEERS[name](folder, float(scale), int(workers))
    print(json.dumps({package: version(package) for package in PACKAGES}), flush=True)
    for _ in sys.stdin:
        start = perf_counter()
        count = sum(epoch())
        print(count / (perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
