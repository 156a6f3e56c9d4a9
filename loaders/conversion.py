"""Conversion of a data set to one `.beton` file and its manifest."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from tqdm.auto import tqdm

from ..errors import DataError
from .encode import encode_image
from .machine import available_cores
from .settings import is_whole
from .sources import Source, open_source
from .writer import PAGE_SIZE, PageTooSmall, Sample, Skipped, write_beton


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        path: the `.beton` file.
        samples: number of samples in it.
        classes: class names in label order; empty if the source names none.
        how: how many images were stored in which way, e.g. `{"passed through": 390, "scaled down": 2}`.
        skipped: `(sample, reason)` of each that was left out (`on_error="skip"` only).
        size: of the file, in bytes.
        seconds: the conversion took.
    """

    path: Path
    samples: int
    classes: list[str]
    how: dict[str, int]
    skipped: list[tuple[str, str]]
    size: int
    seconds: float

    def __str__(self) -> str:
        ways = ", ".join(f"{count:,} {way}" for way, count in self.how.items())
        lines = [
            f"{self.path}: {self.samples:,} images ({ways}), {self.size / 1e6:,.1f} MB, "
            f"{self.samples / max(self.seconds, 1e-9):,.0f} images/s"
        ]
        lines += [f"  left out {name}: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return asdict(self) | {"path": str(self.path)}


def convert(
    source: Any,
    out: str | Path,
    *,
    max_resolution: int | None = None,
    quality: int = 90,
    workers: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    classes: Sequence[str] | None = None,
    progress: bool = True,
) -> ConvertReport:
    """Converts a data set to a `.beton` file that FFCV (and `FFCVLoader`) reads.

    Args:
        source: a folder `CLASS/image.jpg`, a pair of arrays `(images (N, H, W, 3) uint8, labels (N,))`,
            or an indexed data set of `(image, label)`.
        out: the file to write; its manifest goes beside it, with `.json` after the name. The same
            bytes for any number of workers.
        max_resolution: longest side in pixels; larger images are scaled down. None keeps all.
        quality: JPEG quality, 1–100, for images that must be encoded; JPEG files that need no change
            are copied byte for byte. 90 is FFCV's default.
        workers: threads that read and encode; None: one per available core.
        on_error: `"raise"` stops at the first bad image; `"skip"` leaves it out and reports it.
        classes: names of the classes in label order, where the source has none (arrays); None: the
            source's.
        progress: show a bar with images/s and the time left.

    Raises:
        DataError: for a source or image that cannot be used, naming it. No file is left behind.
        DrivetrainError: if the file cannot be written.
    """
    out, start = Path(out), perf_counter()
    _check_arguments(out, max_resolution, quality, workers, on_error)
    samples = open_source(source)
    if len(samples) == 0:
        raise DataError(f"The {samples.kind} holds no samples; there is nothing to convert.")
    names = list(classes or samples.classes)
    about = {
        "classes": names,
        "source": samples.kind,
        "settings": {"max_resolution": max_resolution, "quality": quality},
    }
    threads, page_size = workers or available_cores(), PAGE_SIZE
    while True:
        encoded = _encoded_samples(samples, max_resolution, quality, threads, on_error, progress)
        try:
            written = write_beton(out, encoded, len(samples), page_size, about)
            break
        except PageTooSmall as too_small:
            page_size = 1 << (too_small.size - 1).bit_length()
        finally:
            encoded.close()
    return ConvertReport(
        path=out,
        samples=written.manifest["samples"],
        classes=names,
        how=dict(written.how.most_common()),
        skipped=[(sample.name, sample.reason) for sample in written.skipped],
        size=out.stat().st_size,
        seconds=perf_counter() - start,
    )


def _check_arguments(
    out: Path, max_resolution: int | None, quality: int, workers: int | None, on_error: str
) -> None:
    if max_resolution is not None and not is_whole(max_resolution, 1):
        raise DataError(f"max_resolution={max_resolution!r} must be at least 1 pixel, or None for no limit.")
    if not is_whole(quality, 1, 100):
        raise DataError(f"quality={quality!r} must be an integer from 1 to 100.")
    if workers is not None and not is_whole(workers, 1):
        raise DataError(f"workers={workers!r} must be at least 1, or None for one per core.")
    if on_error not in ("raise", "skip"):
        raise DataError(f"on_error={on_error!r} must be 'raise' or 'skip'.")
    if out.is_dir():
        raise DataError(f"{out} is a folder; name the file to write, e.g. {out / 'train.beton'}.")
    if out.exists() and not out.is_file():
        raise DataError(f"{out} is not an ordinary file and will not be replaced; name another.")
    if not out.parent.is_dir():
        raise DataError(f"The folder {out.parent} does not exist; make it first.")


def _encoded_samples(
    source: Source, max_resolution: int | None, quality: int, workers: int, on_error: str, progress: bool
) -> Generator[Sample | Skipped]:  # fmt: skip
    """Encodes in threads, gives the results in source order, and holds only a few at a time."""

    def work(index: int) -> Sample | Skipped:
        try:
            image, label = source.get(index)
            return Sample(encode_image(image, max_resolution=max_resolution, quality=quality), label)
        except DataError as error:
            reason, cause = str(error), error.__cause__
        except Exception as error:  # whatever a data set's own code raises, it is this sample's fault
            reason, cause = f"reading it raised {type(error).__name__}: {error}", error
        if on_error == "skip":
            return Skipped(source.describe(index), reason)
        raise DataError(
            f"{source.describe(index)}: {reason.rstrip('.')}. Mend or remove it, or use on_error='skip'."
        ) from cause

    waiting: deque[Future[Sample | Skipped]] = deque()
    bar = tqdm(
        total=len(source), desc="Converting", unit="img", disable=not (progress and _watched()), leave=False
    )
    pool = ThreadPoolExecutor(workers, thread_name_prefix="drivetrain-convert")
    try:
        for index in range(len(source)):
            waiting.append(pool.submit(work, index))
            if len(waiting) > 8 * workers:
                yield waiting.popleft().result()
                bar.update()
        while waiting:
            yield waiting.popleft().result()
            bar.update()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        bar.close()


def _watched() -> bool:
    """Whether somebody sees a progress bar: a terminal or a notebook, not a log file."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
