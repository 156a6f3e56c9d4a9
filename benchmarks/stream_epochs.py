"""One contender of `streams.py`, in an environment with its library: writes its format, or streams two epochs of it.

    python benchmarks/stream_epochs.py write drivetrain|litdata|streaming|webdataset IMAGES FOLDER
    python benchmarks/stream_epochs.py read NAME ADDRESS CACHE LIMIT WORKERS

`write` converts an ImageFolder tree, with the bytes of its JPEGs as they are. `read` prints its library's version once
everything is imported, waits for a line on stdin, and then streams two epochs in batches of 64 (RandomResizedCrop
(0.25, 1) to 224, flip, normalized float32), with at most LIMIT bytes in the folder CACHE. It prints the seconds to the
first batch, of epoch one, which includes opening the data, and of epoch two, and the images of each.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

SIDE, BATCH, SCALE = 224, 64, (0.25, 1.0)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BLOCK = 1024  # samples that Streaming mixes, as many as Drivetrain does: of its default, all, the cache has not enough
CHUNK = 1 << 20  # bytes of a shard of the peers: a hundredth of the data, so that many fit into the cache
SHUFFLED = 1000  # samples in WebDataset's buffer

Sample = tuple[bytes, int]
Epochs = Iterable[Any]


def samples(images: Path) -> list[tuple[str, int]]:
    """Return the files and classes of a tree in random order, as peers want data to be written."""
    classes = sorted(folder.name for folder in images.iterdir() if folder.is_dir())
    files = sorted(images.glob("*/*.*"))
    random.Random(0).shuffle(files)
    return [(str(file), classes.index(file.parent.name)) for file in files]


def transform() -> Callable[[Any], Any]:
    """Return torchvision's transforms of a picture of Pillow."""
    import torch
    from torchvision.transforms import v2

    return v2.Compose([
        v2.RandomResizedCrop(SIDE, scale=SCALE), v2.RandomHorizontalFlip(), v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD),
    ])  # fmt: skip


class Decoded:
    """Makes a tensor of a JPEG's bytes."""

    def __init__(self) -> None:
        self._transform = transform()

    def __call__(self, data: bytes) -> Any:
        from io import BytesIO

        from PIL import Image

        return self._transform(Image.open(BytesIO(data)).convert("RGB"))


# --- Drivetrain


def write_drivetrain(images: Path, folder: Path) -> None:
    from drivetrain.loaders import convert

    convert(images, folder / "train.beton", keep_bytes=True, progress=False)


def read_drivetrain(address: str, cache: Path, limit: int, workers: int) -> Epochs:
    from drivetrain.loaders import FFCVLoader

    return FFCVLoader(
        f"{address}/train.beton", batch_size=BATCH, image_size=SIDE, scale=SCALE, workers=workers, drop_last=True,
        stream=True, cache=cache, cache_limit=limit / 1e9, order="quasi_random",
    )  # fmt: skip


# --- litdata


def _litdata_sample(item: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(item[0]).read_bytes(), "label": item[1]}


def write_litdata(images: Path, folder: Path) -> None:
    import litdata

    litdata.optimize(
        fn=_litdata_sample, inputs=samples(images), output_dir=str(folder), chunk_bytes=CHUNK, num_workers=1
    )


def read_litdata(address: str, cache: Path, limit: int, workers: int) -> Epochs:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # of its client for S3: the store has no certificate

    class Images(litdata.StreamingDataset):  # type: ignore[misc]
        decoded = Decoded()

        def __getitem__(self, index: Any) -> Any:
            item = super().__getitem__(index)
            return self.decoded(item["image"]), item["label"]

    host, _, bucket = address.removeprefix("http://").partition("/")
    data = Images(
        f"s3://{bucket}", cache_dir=str(cache), shuffle=True, drop_last=True, max_cache_size=limit,
        storage_options={"endpoint_url": f"http://{host}", **KEYS},
    )  # fmt: skip
    return litdata.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=workers, drop_last=True, persistent_workers=True
    )


# --- MosaicML's Streaming


def write_streaming(images: Path, folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=CHUNK) as writer:
        for file, label in samples(images):
            writer.write({"image": Path(file).read_bytes(), "label": label})


def read_streaming(address: str, cache: Path, limit: int, workers: int) -> Epochs:
    import os

    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    class Images(StreamingDataset):  # type: ignore[misc]
        decoded = Decoded()

        def __getitem__(self, index: Any) -> Any:
            item = super().__getitem__(index)
            return self.decoded(item["image"]), item["label"]

    host, _, bucket = address.removeprefix("http://").partition("/")
    os.environ["S3_ENDPOINT_URL"] = f"http://{host}"
    data = Images(
        remote=f"s3://{bucket}", local=str(cache), shuffle=True, batch_size=BATCH, cache_limit=limit,
        shuffle_block_size=BLOCK,
    )  # fmt: skip
    for stream in data.streams:
        stream._downloader.clean_up()  # the connection for the index, which the workers, forked, would share
    return DataLoader(data, BATCH, num_workers=workers, drop_last=True, persistent_workers=True)


# --- WebDataset


def write_webdataset(images: Path, folder: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(str(folder / "%04d.tar"), maxsize=CHUNK, verbose=0) as writer:
        for number, (file, label) in enumerate(samples(images)):
            writer.write({"__key__": f"{number:06}", "jpg": Path(file).read_bytes(), "cls": label})
    shards = len(list(folder.glob("*.tar")))
    (folder / "shards.txt").write_text(f"{shards - 1:04}")


def read_webdataset(address: str, cache: Path, limit: int, workers: int) -> Epochs:  # noqa: ARG001
    """It keeps no copies, but reads each shard from its address, by curl."""
    from urllib.request import urlopen

    import webdataset

    last = urlopen(f"{address}/shards.txt").read().decode()
    data = webdataset.WebDataset(f"{address}/{{0000..{last}}}.tar", shardshuffle=100, empty_check=False)
    data = data.shuffle(SHUFFLED).to_tuple("jpg", "cls").map_tuple(Decoded(), int).batched(BATCH, partial=False)
    return webdataset.WebLoader(data, batch_size=None, num_workers=workers, persistent_workers=True)


KEYS = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "us-east-1"}
WRITE = {
    "drivetrain": write_drivetrain, "litdata": write_litdata, "streaming": write_streaming,
    "webdataset": write_webdataset,
}  # fmt: skip
READ = {
    "drivetrain": read_drivetrain, "litdata": read_litdata, "streaming": read_streaming,
    "webdataset": read_webdataset,
}  # fmt: skip
MODULES: dict[str, tuple[str, ...]] = {
    "drivetrain": ("drivetrain.loaders.ffcv_loader", "fsspec.implementations.http"),
    "litdata": ("litdata", "obstore.store"),
    "streaming": ("streaming", "boto3"),
    "webdataset": ("webdataset",),
}
"""What each imports, also what it would import at the first use."""
LIBRARIES = {
    "drivetrain": "drivetrain", "litdata": "litdata", "streaming": "mosaicml-streaming", "webdataset": "webdataset",
}  # fmt: skip


def read(name: str, address: str, cache: str, limit: str, workers: str) -> None:
    import importlib
    import importlib.metadata

    for module in ("torchvision", *MODULES[name]):
        importlib.import_module(module)
    print(importlib.metadata.version(LIBRARIES[name]), flush=True)
    sys.stdin.readline()
    start = perf_counter()
    loader = READ[name](address, Path(cache), int(limit), int(workers))
    marks: list[float] = []
    images = []
    for _ in range(2):
        count = 0
        for batch, *_ in loader:
            marks = marks or [perf_counter()]
            count += len(batch)
        marks.append(perf_counter())
        images.append(count)
    seconds = {
        "first batch": marks[0] - start,
        "epoch one": marks[1] - start,
        "epoch two": marks[2] - marks[1],
    }
    print(json.dumps({"seconds": seconds, "images": images}), flush=True)
    sys.stdin.readline()  # memory and traffic are read before this process ends


def main() -> None:
    what, name, *rest = sys.argv[1:]
    if what == "write":
        WRITE[name](Path(rest[0]), Path(rest[1]))
    else:
        read(name, *rest)


if __name__ == "__main__":
    main()
