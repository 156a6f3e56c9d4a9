"""Looking into a `.beton` file: what it holds, whether all of it is sound, and a sheet of its pictures."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tqdm.auto import tqdm

from ..errors import DataError
from ..files import atomic_file
from . import libffcv
from .beton import MODE_JPEG, Beton, checksum, open_beton
from .machine import available_cores


@dataclass(frozen=True)
class Spread:
    """The distribution of a quantity over all samples."""

    smallest: float
    median: float
    mean: float
    largest: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Spread:
        """Of an array of numbers."""
        return cls(float(values.min()), float(np.median(values)), float(values.mean()), float(values.max()))

    def __str__(self) -> str:
        return (
            f"{self.smallest:,.0f} to {self.largest:,.0f}, median {self.median:,.0f}, mean {self.mean:,.0f}"
        )


@dataclass(frozen=True)
class Inspection:
    """What a `.beton` file holds.

    Attributes:
        path: the file; `size`: its length in bytes; `page_size`: in bytes.
        samples: their number; `jpegs`, `raws`: how many are stored as JPEG and as raw pixels.
        fields: field name to kind; empty without a manifest.
        classes: class name (its number where the file names none) to its count; empty for float labels.
        width, height: of the images, in pixels; `image_bytes`: as stored.
        checked: whether a manifest with checksums stands beside the file.
    """

    path: str
    size: int
    page_size: int
    samples: int
    jpegs: int
    raws: int
    fields: dict[str, str]
    classes: dict[str, int]
    width: Spread
    height: Spread
    image_bytes: Spread
    checked: bool

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.samples:,} samples, {self.size / 1e6:,.1f} MB, pages of {self.page_size >> 20} MiB",
            f"  stored: {self.jpegs:,} JPEG, {self.raws:,} raw",
            f"  fields: {', '.join(f'{name} ({kind})' for name, kind in self.fields.items()) or 'no manifest'}",
            f"  width:  {self.width} pixels",
            f"  height: {self.height} pixels",
            f"  image:  {self.image_bytes} bytes",
            f"  checksums: {'yes' if self.checked else 'none (no manifest beside the file)'}",
        ]
        if self.classes:
            counts = np.array(list(self.classes.values()))
            lines.append(f"  {len(counts)} classes of {Spread.of(counts)} samples")
            shown = list(self.classes.items())
            lines += [f"    {name}: {count:,}" for name, count in shown[:20]]
            lines += [f"    … and {len(shown) - 20} more"] if len(shown) > 20 else []
        return "\n".join(lines)


def inspect(path: str | Path) -> Inspection:
    """Reads a file's tables (no image is decoded) and counts what is in it.

    Raises:
        BetonError: if the file's structure is unsound.
    """
    beton = open_beton(path)
    jpegs = int((beton.modes == MODE_JPEG).sum())
    return Inspection(
        path=str(path),
        size=len(beton.data),
        page_size=beton.page_size,
        samples=len(beton),
        jpegs=jpegs,
        raws=len(beton) - jpegs,
        fields=dict(beton.manifest.get("fields", {})),
        classes=_class_counts(beton),
        width=Spread.of(beton.widths),
        height=Spread.of(beton.heights),
        image_bytes=Spread.of(beton.sizes),
        checked="crc32" in beton.manifest,
    )


def _class_counts(beton: Beton) -> dict[str, int]:
    if beton.labels.dtype != np.int64:
        return {}
    counts = np.bincount(beton.labels, minlength=len(beton.classes))
    names = beton.classes or [str(number) for number in range(len(counts))]
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        path: the file; `samples`: how many were examined.
        bad: `(sample, reason)` of each that does not decode or does not match its checksum.
        checked: whether there were checksums to compare with.
    """

    path: str
    samples: int
    bad: list[tuple[int, str]]
    checked: bool

    @property
    def sound(self) -> bool:
        """Whether nothing was found."""
        return not self.bad

    def __str__(self) -> str:
        how = "structure, checksums and decoding" if self.checked else "structure and decoding (no checksums)"
        found = "all sound" if self.sound else f"{len(self.bad):,} bad"
        lines = [f"{self.path}: {self.samples:,} samples, {how}: {found}"]
        return "\n".join([*lines, *(f"  sample {number}: {reason}" for number, reason in self.bad)])


def verify(path: str | Path, *, workers: int | None = None, progress: bool = True) -> Verification:
    """Examines a file whole: its structure, every checksum, and every image by decoding it.

    Args:
        path: the file; its manifest beside it, if there is one, holds the checksums.
        workers: threads; None: one per available core.
        progress: show a bar.

    Raises:
        BetonError: if the structure is unsound, so that samples cannot even be found.
        MissingExtra: without FFCV.
    """
    beton = open_beton(path)
    libffcv.library()  # its absence is an error here, not in a thread
    checksums = beton.manifest.get("crc32")

    def examine(number: int) -> str | None:
        stored = beton.stored(number)
        if checksums is not None and checksum(stored, beton.labels[number]) != checksums[number]:
            return "its checksum differs from the manifest's: the image or its label has changed"
        width, height = int(beton.widths[number]), int(beton.heights[number])
        if beton.modes[number] == MODE_JPEG and not libffcv.decodes(stored, width, height):
            return "its JPEG data does not decode"
        return None

    with ThreadPoolExecutor(workers or available_cores()) as pool:
        reasons = tqdm(
            pool.map(examine, range(len(beton)), chunksize=64),
            total=len(beton), desc="Verifying", unit="img", disable=not progress, leave=False,
        )  # fmt: skip
        bad = [(number, reason) for number, reason in enumerate(reasons) if reason is not None]
    return Verification(str(path), len(beton), bad, checksums is not None)


def contact_sheet(
    path: str | Path, out: str | Path, *, columns: int = 8, rows: int = 6, side: int = 128
) -> None:
    """Writes a PNG of pictures spread evenly over the file, each with its number and label.

    Args:
        path: the `.beton` file.
        out: the picture to write, `.png`.
        columns, rows: how many pictures at most.
        side: of each, in pixels.

    Raises:
        BetonError: if the file is unsound; DataError: for an `out` that does not end in `.png`.
    """
    if Path(out).suffix != ".png":
        raise DataError(f"{out}: the contact sheet is a PNG; give a name that ends in .png.")
    beton = open_beton(path)
    count = min(columns * rows, len(beton))
    chosen = np.linspace(0, len(beton) - 1, count).round().astype(int)
    sheet = Image.new("RGB", (min(columns, count) * side, -(-count // columns) * (side + 14)), "white")
    draw = ImageDraw.Draw(sheet)
    for place, number in enumerate(chosen):
        left, top = place % columns * side, place // columns * (side + 14)
        picture = beton.image(int(number))
        picture.thumbnail((side - 4, side - 4))
        sheet.paste(picture, (left + (side - picture.width) // 2, top + (side - picture.height) // 2))
        label = beton.labels[number]
        name = beton.classes[label] if beton.classes else f"{label:g}"
        draw.text((left + 3, top + side - 1), f"{number} {name}"[: side // 6], fill="black")
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    with atomic_file(Path(out)) as file:
        file.write(buffer.getvalue())
