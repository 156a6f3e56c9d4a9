"""Conversion of a data set to one `.beton` file and its manifest."""

from __future__ import annotations

import json
import zlib
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, Literal

import numpy as np
from tqdm.auto import tqdm

from ..errors import DataError
from ..files import atomic_file
from .beton import (
    ALLOCATION,
    FIELD,
    FLOAT_FIELD,
    HEADER,
    IMAGE_FIELD,
    INT_FIELD,
    MAX_PAGE,
    VERSION,
    manifest_path,
    metadata_dtype,
)
from .encode import Encoded, encode_image
from .machine import available_cores
from .sources import Source, open_source

PAGE_SIZE = 1 << 23
"""8 MiB, FFCV's own default; doubled until the largest sample fits on a page."""


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
    page_size = PAGE_SIZE
    while True:
        encoded = _encoded_samples(
            samples, max_resolution, quality, workers or available_cores(), on_error, progress
        )
        try:
            written = _write(out, encoded, len(samples), page_size)
            break
        except _PageTooSmall as too_small:
            page_size = 1 << (too_small.size - 1).bit_length()
        finally:
            encoded.close()
    written.manifest |= {
        "classes": names,
        "source": samples.kind,
        "settings": {"max_resolution": max_resolution, "quality": quality},
    }
    with atomic_file(manifest_path(out)) as file:
        file.write(json.dumps(written.manifest, indent=1).encode())
    return ConvertReport(
        path=out,
        samples=written.manifest["samples"],
        classes=names,
        how=dict(written.how.most_common()),
        skipped=written.skipped,
        size=out.stat().st_size,
        seconds=perf_counter() - start,
    )


def _check_arguments(
    out: Path, max_resolution: int | None, quality: int, workers: int | None, on_error: str
) -> None:
    if max_resolution is not None and max_resolution < 1:
        raise DataError(f"max_resolution={max_resolution} must be at least 1 pixel, or None for no limit.")
    if not 1 <= quality <= 100:
        raise DataError(f"quality={quality} must lie from 1 to 100.")
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers} must be at least 1, or None for one per core.")
    if on_error not in ("raise", "skip"):
        raise DataError(f"on_error={on_error!r} must be 'raise' or 'skip'.")
    if out.is_dir():
        raise DataError(f"{out} is a folder; name the file to write, e.g. {out / 'train.beton'}.")
    if not out.parent.is_dir():
        raise DataError(f"The folder {out.parent} does not exist; make it first.")


@dataclass(frozen=True)
class _Sample:
    encoded: Encoded
    label: int | float


@dataclass(frozen=True)
class _Skipped:
    name: str
    reason: str


def _encoded_samples(
    source: Source, max_resolution: int | None, quality: int, workers: int, on_error: str, progress: bool
) -> Generator[_Sample | _Skipped]:  # fmt: skip
    """Encodes in threads, gives the results in source order, and holds only a few at a time."""

    def work(index: int) -> _Sample | _Skipped:
        try:
            image, label = source.get(index)
            return _Sample(encode_image(image, max_resolution=max_resolution, quality=quality), label)
        except DataError as error:
            if on_error == "skip":
                return _Skipped(source.describe(index), str(error))
            raise DataError(
                f"{source.describe(index)}: {error}. Mend or remove it, or use on_error='skip'."
            ) from None

    waiting: deque[Future[_Sample | _Skipped]] = deque()
    bar = tqdm(total=len(source), desc="Converting", unit="img", disable=not progress, leave=False)
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


class _PageTooSmall(Exception):
    def __init__(self, size: int) -> None:
        self.size = size


@dataclass
class _Written:
    manifest: dict[str, Any] = field(default_factory=dict)
    how: Counter[str] = field(default_factory=Counter)
    skipped: list[tuple[str, str]] = field(default_factory=list)


def _write(out: Path, samples: Iterator[_Sample | _Skipped], most: int, page_size: int) -> _Written:
    """Writes the file: images as they come, then the tables, and the header last."""
    written, label_kind = _Written(), INT_FIELD
    rows: list[tuple[int, int, int, int, int]] = []  # mode, width, height, pointer, size
    labels: list[int | float] = []
    checksums: list[int] = []
    with atomic_file(out) as file:
        start = (
            HEADER.itemsize + 2 * FIELD.itemsize + most * metadata_dtype([IMAGE_FIELD, INT_FIELD]).itemsize
        )
        cursor = -(-start // page_size) * page_size
        for sample in samples:
            if isinstance(sample, _Skipped):
                written.skipped.append((sample.name, sample.reason))
                continue
            image = sample.encoded
            cursor = _place(cursor, len(image.payload), page_size)
            file.seek(cursor)
            file.write(image.payload)
            rows.append((image.mode, image.width, image.height, cursor, len(image.payload)))
            labels.append(sample.label)
            checksums.append(zlib.crc32(image.payload))
            written.how[image.how] += 1
            cursor += len(image.payload)
        if not rows:
            raise DataError(f"None of the {most} samples could be used: {written.skipped[0][1]}.")
        if any(isinstance(label, float) for label in labels):
            label_kind = FLOAT_FIELD
        elif min(labels) < 0:
            raise DataError(
                f"Sample {labels.index(min(labels))} has the class {min(labels)}; classes start at 0."
            )
        _write_tables(file, rows, labels, label_kind, cursor, page_size)
        manifest_path(out).unlink(missing_ok=True)  # an older conversion's must not describe this one
    written.manifest = {
        "format": "beton 2",
        "samples": len(rows),
        "fields": {"image": "rgb_image", "label": "int" if label_kind == INT_FIELD else "float"},
        "page_size": page_size,
        "stored": dict(written.how.most_common()),
        "crc32": checksums,
    }
    return written


def _place(cursor: int, size: int, page_size: int) -> int:
    """Where an allocation goes: at the cursor, or at the next page if it would cross into it."""
    if size > page_size:
        if size > MAX_PAGE:
            raise DataError(f"A sample of {size:,} bytes is larger than the format's largest page, 2 GiB.")
        raise _PageTooSmall(size)
    page_end = (cursor // page_size + 1) * page_size
    return cursor if cursor + size <= page_end else page_end


def _write_tables(
    file: BinaryIO,
    rows: list[tuple[int, int, int, int, int]],
    labels: list[int | float],
    label_kind: int,
    end: int,
    page_size: int,
) -> None:
    table = np.zeros(len(rows), dtype=ALLOCATION)
    metadata = np.zeros(len(rows), dtype=metadata_dtype([IMAGE_FIELD, label_kind]))
    modes, widths, heights, pointers, sizes = (np.array(column) for column in zip(*rows, strict=True))
    table["sample_id"], table["ptr"], table["size"] = np.arange(len(rows)), pointers, sizes
    image = metadata["f0"]
    image["mode"], image["width"], image["height"], image["data_ptr"] = modes, widths, heights, pointers
    metadata["f1"] = labels
    file.seek(end)
    file.write(table.tobytes())

    fields = np.zeros(2, dtype=FIELD)
    for row, name, kind in zip(fields, (b"image", b"label"), (IMAGE_FIELD, label_kind), strict=True):
        row["type_id"] = kind
        row["name"][: len(name)] = np.frombuffer(name, dtype=np.uint8)
    file.seek(HEADER.itemsize)
    file.write(fields.tobytes() + metadata.tobytes())

    header = np.array([(VERSION, 2, page_size, len(rows), end)], dtype=HEADER)
    file.seek(0)
    file.write(header.tobytes())
