"""`advise`: measure which format and resolution suits a data set on this machine."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np

from ...common import machine
from ...common.budget import Budget
from ...common.checks import check_number, check_whole, plain
from ...common.errors import DataError
from ...common.signals import handled
from ..image_size import ImageSize
from ..options import LoaderOptions, check_workers
from .report import Advice, Rate, Row, bound, by_loss, bytes_text
from .sample import Converted, Sample, converted, disk_rate, distinct, formats, loading_rate, open_data_set

_PILOT = 16  # images that are converted first, to know how long it takes and how large the files become
_SHARE = 1 / 3  # fraction of the time for converting
_ROUNDS = 7  # that should fit into the time


def advise(
    source: str | Path,
    *,
    image_size: ImageSize = 224,
    wanted: float | None = None,
    samples: int = 300,
    seconds: float = 60,
    workers: int | None = None,
    scratch: str | Path | None = None,
    progress: bool = True,
) -> Advice:
    """Measure in which format a data set loads how fast on this machine, and advise one.

    A random sample of the images, the same in every call, is converted in several ways: as stored, with a longest side
    of 500 and 400 pixels, and with a shortest side of 256 pixels, as JPEG and as raw pixels (for images of 224 pixels,
    otherwise in proportion). One with nearly the pixels of another, within 5 %, is left out. The files are temporary.

    The rate of a format in training is that of the loader; or that of the disk, if it is lower and the data set does
    not fit into the memory that is free now.

    Args:
        source: a folder with images anywhere below it, or a `.beton` file, or several: `train-{000..127}.beton`.
        image_size: of the loaded images: one side, or height and width, in pixels.
        wanted: images per second that are enough, e.g. what the model trains at. Advises the format with the smallest
            loss of quality that reaches them. Default None: the fastest format.
        samples: number of images in the sample; fewer if the time does not suffice.
        seconds: time for everything. The last round of measurements, or the conversion, may exceed it.
        workers: number of threads. Default None: one per available core.
        scratch: folder for the temporary files, on the disk that the data set will be on. Default None: the system's
            temporary folder.
        progress: whether to show a bar.

    Raises:
        DataError: for an invalid argument; if there are no images, or none can be read; if the disk has too little
            space for the files, or the time does not suffice for one round.
    """
    begin = perf_counter()
    wanted, seconds, samples = plain(wanted), plain(seconds), plain(samples)
    if wanted is not None:
        check_number("wanted", wanted, DataError, "(0, inf)", also=", or None for the most")
    check_number("seconds", seconds, DataError, "(0, inf)")
    check_whole("samples", samples, DataError, 1)
    size = LoaderOptions(batch_size=1, image_size=image_size).size
    threads = check_workers(workers)
    data = open_data_set(source)
    sample = data.sample(samples)
    with _temporary_folder(scratch) as folder, _Budget(seconds, begin, progress, "advise") as budget:
        tried, files = _convert_all(sample, formats(data, max(size)), folder, threads, budget)
        kept, others = distinct(files)
        trials = _Trials(kept, size, threads)
        trials.run(budget)
    memory = machine.free_memory()
    return Advice(
        source=str(source), images=data.images, sampled=len(kept[0].sizes), unusable=tried - len(kept[0].sizes),
        image_size=size, workers=threads, memory=memory, disk=trials.bandwidth(), scratch=str(folder.parent),
        rounds=trials.rounds, seconds=perf_counter() - begin, wanted=wanted,
        rows=by_loss([trials.row(file, data.images, memory) for file in kept]),
        left_out=[file.name for file in others],
    )  # fmt: skip


class _Budget(Budget):
    """The time for everything, in which a Ctrl-C that Python ignores is not lost: one while it removes an object."""

    _interrupted = False

    def show(self, what: str) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        super().show(what)

    def require_time(self, what: str) -> None:
        if self.left <= 0:
            raise DataError(
                f"seconds={self.seconds:g} is too short: {what} took {self.used:.1f} s. Use at least "
                f"{max(3 * self.used, 1):.0f}, or fewer samples."
            )

    def __enter__(self) -> Self:
        self._context = ExitStack()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._context.enter_context(handled([signal.SIGINT], self._interrupt))
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.close()
        super().__exit__(*exception)

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        raise KeyboardInterrupt


@contextmanager
def _temporary_folder(scratch: str | Path | None) -> Iterator[Path]:
    """Yield a new folder, which is removed after the block, however it ends."""
    try:
        made = tempfile.TemporaryDirectory(prefix="drivetrain-advise-", dir=scratch)
    except OSError as error:
        raise DataError(
            f"No temporary folder can be made in {scratch or tempfile.gettempdir()}: {error.strerror}. Pass another "
            "folder as scratch (--scratch)."
        ) from None
    try:
        yield Path(made.name).resolve()
    finally:
        with handled([signal.SIGINT], lambda *_: None):  # a second Ctrl-C does not stop this
            made.cleanup()


def _convert_all(
    sample: Sample, ways: Sequence[dict[str, Any]], folder: Path, threads: int, budget: _Budget
) -> tuple[int, list[Converted]]:
    """Convert a sample in all ways: as many images as there is time for. Return their number and the files."""

    def convert_as(number: int, images: Sample) -> Converted:
        budget.show("converting")
        file = converted(images, folder / f"{number}.beton", ways[number], threads)
        budget.require_time(f"converting {len(images)} images")
        return file

    pilot = sample.first(_PILOT)
    files = [convert_as(number, pilot) for number in range(len(ways))]
    each = sum(file.seconds for file in files) / len(pilot)
    count = min(int(budget.seconds * _SHARE / each), len(sample))
    if count <= len(pilot):
        return len(pilot), files
    needed = count * sum(int(file.sizes.sum()) for file in files) / len(files[0].sizes)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"The temporary files need {bytes_text(needed)}, and {folder.parent} has {bytes_text(free)} left. Use "
            "fewer samples, or a folder on another disk (scratch, --scratch)."
        )
    more = sample.first(count)
    return count, [convert_as(number, more) for number in range(len(ways))]


class _Trials:
    """The trials of all formats: in each round, of each of them, in changing order."""

    def __init__(self, files: Sequence[Converted], image_size: ImageSize, threads: int) -> None:
        self._files, self._image_size, self._threads = files, image_size, threads
        self._rates: defaultdict[tuple[Path, int], list[float]] = defaultdict(list)
        self._disk: defaultdict[Path, list[float]] = defaultdict(list)
        self.rounds = 0

    def run(self, budget: _Budget) -> None:
        budget.show("warming up")
        expected = {}
        for file in self._files:
            expected[file.path] = loading_rate(file, self._image_size, self._threads, 0, 0, 0)
            budget.require_time("warming up")
        counts = sorted({1, self._threads})
        each = budget.left / _ROUNDS / (len(self._files) * (len(counts) + 1))
        longest = 0.0
        while self.rounds == 0 or budget.left > longest:
            begin = perf_counter()
            for place in range(len(self._files)):
                file = self._files[(place + self.rounds) % len(self._files)]
                budget.show(f"round {self.rounds + 1}: {file.name}")
                for workers in counts:
                    rate = expected[file.path] * workers / self._threads
                    rate = loading_rate(file, self._image_size, workers, rate, each, self.rounds)
                    self._rates[file.path, workers].append(rate)
                disk = disk_rate(file, self._threads, each, self.rounds)
                if disk is not None:
                    self._disk[file.path].append(disk)
            self.rounds += 1
            longest = max(longest, perf_counter() - begin)

    def bandwidth(self) -> float | None:
        """Return the bytes per second that the disk delivers, in the median over all rounds and formats."""
        rates = [rate * file.sizes.mean() for file in self._files for rate in self._disk[file.path]]
        return float(np.median(rates)) if rates else None

    def row(self, file: Converted, images: int, memory: float) -> Row:
        loader, disk = Rate.of(self._rates[file.path, self._threads]), self._disk[file.path]
        cold = Rate.of(disk) if disk else None
        size = float(file.sizes.mean()) * images
        rate, bottleneck = bound(loader.median, cold.median if cold else None, size, memory)
        return Row(
            name=file.name, options=file.options, bytes_per_image=float(file.sizes.mean()), size=size,
            pixels=file.pixels, reencoded=file.reencoded, one_worker=Rate.of(self._rates[file.path, 1]),
            all_workers=loader, disk=cold, rate=rate, bottleneck=bottleneck, fits=size <= memory,
        )  # fmt: skip
