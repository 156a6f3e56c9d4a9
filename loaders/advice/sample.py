"""A sample of a data set's images, the formats it is converted to, and trials of one: loading and reading it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.errors import DataError
from ...common.threads import in_order
from ..beton.data_set import open_files
from ..beton.image_modes import RGB, channels_text
from ..beton.layout import MODE_JPEG
from ..beton.reader import open_beton
from ..conversion.convert import convert
from ..conversion.folders import EXTENSIONS, files_below, without_waiting
from ..ffcv_loader import FFCVLoader
from ..image_size import ImageSize

# Treatments of `convert` that keep a JPEG's pixels.
_KEPT = ("copied unchanged", "recoded losslessly as baseline")
_USUAL = 224  # the image size that the sides in `formats` are usual for; for other sizes they are scaled
_SAME = 0.05  # formats whose mean numbers of pixels differ by less than this fraction are not both measured

_WARM = 6  # batches that are loaded before the clock starts: as many as the loader allocates
_TIMED = 8  # batches with the clock running, at least
_SMALLEST = 4  # images per batch, at least
_PROBED = 4  # images that are looked for in memory after they should have left it


class Sample:
    """Some images of a data set, by their `numbers`, as `convert` takes them."""

    def __init__(self, get: Callable[[int], Any], numbers: NDArray[np.int64]) -> None:
        self._get, self._numbers = get, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._get(int(self._numbers[index])), 0

    def first(self, count: int) -> Sample:
        return Sample(self._get, self._numbers[:count])


@dataclass(frozen=True)
class DataSet:
    images: int
    raw: bool  # whether all are stored as raw pixels
    get: Callable[[int], Any]

    def sample(self, count: int) -> Sample:
        """Return a random sample, in random order, the same in every call."""
        return Sample(self.get, np.random.default_rng(0).permutation(self.images)[:count])


def open_data_set(source: str | Path) -> DataSet:
    """Open a folder with images anywhere below it, or `.beton` files."""
    if not isinstance(source, str | Path) or not str(source):
        raise DataError(f"source={source!r:.80} must be a folder of images or a .beton file.")
    if Path(source).is_dir():
        return _open_folder(Path(source))
    if Path(source).suffix == ".beton":
        return _open_betons(str(source))
    what = "is not a folder" if Path(source).exists() else "does not exist"
    raise DataError(f"{source} {what}. Pass a folder of images or a .beton file.")


def _open_folder(folder: Path) -> DataSet:
    files = files_below(folder)[0]
    if not files:
        raise DataError(f"{folder} contains no images ({', '.join(EXTENSIONS)}). Pass a folder of images.")

    def read(number: int) -> bytes:
        try:
            with open(files[number], "rb", opener=without_waiting) as file:
                return file.read()
        except OSError as error:
            raise DataError(f"{files[number]} cannot be read: {error.strerror}.") from None

    return DataSet(len(files), False, read)


def _open_betons(source: str) -> DataSet:
    files = open_files(source)
    if (files.channels, files.depth) != RGB:
        raise DataError(
            f"{source} has images of {channels_text(files.channels, files.depth)}, which are stored as raw pixels of "
            "one size: there are no formats to compare."
        )

    def stored(number: int) -> Any:
        beton, own = files.locate(number)
        return beton.stored(own) if beton.modes[own] == MODE_JPEG else beton.image(own)

    return DataSet(len(files), bool((files.modes != MODE_JPEG).all()), stored)


def formats(data: DataSet, side: int) -> list[dict[str, Any]]:
    """Return the arguments of `convert` for each format, for images loaded with this longer side."""
    long, short, shortest = (round(usual * side / _USUAL) for usual in (500, 400, 256))
    return [
        {"write_mode": "raw"} if data.raw else {},
        {"max_resolution": long},
        {"max_resolution": short},
        {"min_resolution": shortest, "write_mode": "raw"},
        {"min_resolution": shortest},
    ]


@dataclass(frozen=True)
class Converted:
    path: Path
    options: dict[str, Any]  # of `convert`
    pointers: NDArray[np.uint64]
    sizes: NDArray[np.uint64]  # bytes
    pixels: float  # mean of the images
    jpegs: float  # fraction stored as JPEG
    reencoded: float  # fraction that was compressed as JPEG again
    seconds: float

    @property
    def name(self) -> str:
        kind = "JPEG" if self.jpegs > 0.5 else "raw"
        if side := self.options.get("max_resolution"):
            return f"{kind}, longest side {side}"
        if side := self.options.get("min_resolution"):
            return f"{kind}, shortest side {side}"
        return "as stored" if self.reencoded < 0.5 else f"{kind}, own size"

    def resembles(self, other: Converted) -> bool:
        close = abs(self.pixels - other.pixels) <= _SAME * max(self.pixels, other.pixels)
        return close and abs(self.jpegs - other.jpegs) <= _SAME


def converted(sample: Sample, path: Path, options: dict[str, Any], workers: int) -> Converted:
    """Convert a sample. Images that cannot be read are left out."""
    start = perf_counter()
    report = convert(sample, path, workers=workers, on_error="skip", progress=False, **options)
    beton = open_beton(path)
    jpegs = report.modes.get("jpg", 0)
    kept = sum(report.treatments.get(name, 0) for name in _KEPT)
    return Converted(
        path, options, beton.pointers, beton.sizes,
        pixels=float((beton.widths.astype(np.int64) * beton.heights).mean()),
        jpegs=jpegs / len(beton),
        reencoded=max(jpegs - kept, 0) / len(beton),
        seconds=perf_counter() - start,
    )  # fmt: skip


def distinct(files: Sequence[Converted]) -> tuple[list[Converted], list[Converted]]:
    """Return the files that differ from all before them, and the others."""
    kept, others = list[Converted](), list[Converted]()
    for file in files:
        (others if any(file.resembles(one) for one in kept) else kept).append(file)
    return kept, others


def loading_rate(
    file: Converted, image_size: ImageSize, workers: int, expected: float, seconds: float, epoch: int
) -> float:
    """Return the images per second of a loader, measured for about `seconds`, without its first batches. `expected` is
    about how many images per second it loads; 0 for the shortest trial."""
    images = expected * seconds
    batch = int(np.clip(images / (_WARM + _TIMED), _SMALLEST, max(16 * workers, 32)))
    batches = max(round(images / batch), _WARM + _TIMED)
    samples = np.resize(np.arange(len(file.sizes)), batch * batches)
    with FFCVLoader(
        file.path, batch_size=batch, image_size=image_size, workers=workers, indices=samples,
        rank=0, world_size=1,
    ) as loader:  # fmt: skip
        loader.set_epoch(epoch)
        start = perf_counter()
        for number, _ in enumerate(loader, 1):
            if number == _WARM:
                start = perf_counter()
    return batch * (batches - _WARM) / (perf_counter() - start)


def disk_rate(file: Converted, threads: int, seconds: float, seed: int) -> float | None:
    """Return the images per second that threads read from disk, one by one in random order, within about `seconds`;
    None if the system does not drop a file from memory, or does not report whether it has."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return None  # macOS
    places = list(zip(file.pointers.tolist(), file.sizes.tolist(), strict=True))
    order = np.random.default_rng(seed).permutation(len(places)).tolist()
    with file.path.open("rb") as opened:
        descriptor = opened.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no other images in advance
        if any(_in_memory(descriptor, places[number][0]) for number in order[:_PROBED]):
            _into_memory(descriptor)
            return None
        start, numbers = perf_counter(), itertools.count()

        def read(_: int) -> int:
            done = 0
            while (number := next(numbers)) < len(order):
                pointer, size = places[order[number]]
                os.pread(descriptor, size, pointer)
                done += 1
                if perf_counter() >= start + seconds:
                    break
            return done

        with closing(in_order(read, range(threads), threads, "drivetrain-read")) as counts:
            images = sum(counts)
        rate = images / (perf_counter() - start)
        _into_memory(descriptor)
        return rate


def _into_memory(descriptor: int) -> None:
    """Read a file whole, so that the next trial of the loader does not read from disk what this one has dropped."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while os.read(descriptor, 1 << 20):
        pass


def _in_memory(descriptor: int, place: int) -> bool:
    """Return whether a byte of a file is in memory; True if the file system cannot tell."""
    try:
        os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True
