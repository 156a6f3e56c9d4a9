"""One peer's loader, in an environment without Drivetrain; `peers.py` starts it.

    python benchmarks/peer_epochs.py dali|torchcodec|torchvision|spdl FOLDER SCALE WORKERS

For each line on stdin it runs an epoch over the folder (RandomResizedCrop (SCALE, 1) to 224, flip, normalized float32)
and prints images/s. The first line printed has the versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

SIDE, BATCH = 224, 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PACKAGES = ("torch", "torchvision", "torchcodec", "nvidia-dali-cuda120", "spdl")


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


def crop_box(height: int, width: int, scale: float) -> tuple[int, int, int, int]:
    """Draw the height, width, top and left of a random resized crop."""
    for _ in range(10):
        area = height * width * random.uniform(scale, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            return down, across, random.randint(0, height - down), random.randint(0, width - across)
    return height, width, 0, 0


def spdl(folder: str, scale: float, workers: int) -> Callable[[], Iterator[int]]:
    """SPDL's threads: each decodes a batch, with crop, resize and flip in FFmpeg's filter graph, and normalizes it."""
    import spdl.io
    import torch
    from spdl.pipeline import PipelineBuilder

    torch.set_num_threads(1)  # per thread of SPDL
    files = sorted(str(path) for path in Path(folder).rglob("*.jp*g"))
    # Of a line of pixels: torch is slower with the three channels as innermost dimension.
    factors = (1 / (255 * torch.tensor(STD))).repeat(SIDE)
    summands = (-torch.tensor(MEAN) / torch.tensor(STD)).repeat(SIDE)

    def decode(path: str) -> Any:
        packets = spdl.io.demux_image(path)
        down, across, top, left = crop_box(packets.codec.height, packets.codec.width, scale)
        steps = f"crop={across}:{down}:{left}:{top},scale={SIDE}:{SIDE}:flags=bilinear"
        steps += ",hflip" * (random.random() < 0.5)
        graph = spdl.io.get_video_filter_desc(filter_desc=steps, pix_fmt="rgb24")
        return spdl.io.decode_packets(packets, filter_desc=graph)

    decode(files[0])  # an error here ends the process; in the pipeline it is logged, and the batch left out

    def load(paths: list[str]) -> Any:
        images = spdl.io.to_torch(spdl.io.convert_frames([decode(path) for path in paths]))
        lines = torch.mul(images.flatten(2), factors).add_(summands)
        return lines.unflatten(2, (SIDE, 3)).permute(0, 3, 1, 2)

    def epoch() -> Iterator[int]:
        shuffled = random.sample(files, len(files))
        batches = PipelineBuilder().add_source(shuffled).aggregate(BATCH, drop_last=True)
        loaded = batches.pipe(load, concurrency=workers).add_sink(3)
        pipeline = loaded.build(num_threads=workers, max_failures=0)
        with pipeline.auto_stop():
            for images in pipeline:
                yield len(images)

    return epoch


PEERS = {"dali": dali, "torchcodec": torchcodec, "torchvision": torchvision, "spdl": spdl}


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
