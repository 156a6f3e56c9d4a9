"""Inspect a `.beton` file: its content, whether all samples are intact, and a contact sheet."""

from __future__ import annotations

import html
import io
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ...common.checks import check_whole, plain
from ...common.errors import BetonError, DataError, require_suffix
from ...common.storage.files import write_file
from ...common.terminal import shortened
from ..native import jpegs
from ..native.stop import stoppable
from ..options import check_workers
from .layout import MODE_JPEG
from .open_file import ChangedError, ReadError
from .reader import Beton, open_beton
from .targets import NOT_COUNTED, check_classes, coordinates, decode_mask, palette

_CHUNK = 64  # samples that a thread checks at a time: enough that starting costs nothing, few for an even progress bar
_MASKS = 200  # masks that `inspect` decodes at most, to count the pixels of each class


@dataclass(frozen=True)
class Spread:
    smallest: float
    median: float
    mean: float
    largest: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Spread:
        return cls(float(values.min()), float(np.median(values)), float(values.mean()), float(values.max()))

    def __str__(self) -> str:
        if self.smallest == self.largest:
            return f"{self.smallest:,.0f}"
        ends = f"{self.smallest:,.0f} to {self.largest:,.0f}"
        return f"{ends}, median {self.median:,.0f}, mean {self.mean:,.0f}"


@dataclass(frozen=True)
class MaskPixels:
    masks: int  # number of masks whose pixels were counted, at most 200, taken evenly from the file
    damaged: int  # number of masks that could not be decoded, besides these
    classes: dict[str, int]  # name, or index if there is none, to the number of its pixels, in label order

    def lines(self, name: str, samples: int) -> list[str]:
        of = f"all {samples:,}" if self.masks == samples else f"{self.masks:,} of {samples:,}"
        damaged = f", {self.damaged:,} cannot be decoded (see: drivetrain verify)" if self.damaged else ""
        every, shown = sum(self.classes.values()), list(self.classes.items())
        first = f"  {name}: {len(shown)} class indices in {of} masks{damaged}, with their share of the pixels"
        return [first, *_listed([f"{one}: {100 * count / every:.2f} %" for one, count in shown])]


def _listed(entries: list[str]) -> list[str]:
    more = [f"… and {len(entries) - 20} more"] if len(entries) > 20 else []
    return [f"    {entry}" for entry in entries[:20] + more]


@dataclass(frozen=True)
class Inspection:
    """The content of a `.beton` file.

    Attributes:
        path: the file; `size`: its length in bytes; `page_size`: in bytes.
        samples: number of samples; `jpegs`, `raws`: number stored as JPEG and as raw pixels.
        fields: field name to kind; for an ndarray with its type and shape; mask, boxes or keypoints for targets that
            move with the image.
        classes: class name (or index, if the file has no names; both, if another class has the name) to its sample
            count, if labels are ints; of vectors of 0 and 1, each label's name to the number of samples that have it;
            else empty.
        width, height: of the images, in pixels; `image_bytes`: as stored.
        field_bytes: of each bytes and JSON field, as stored.
        masks: for each field of masks, its pixels per class.
        checked: whether there is a manifest with checksums.

    Example::

        >>> inspection = inspect("train.beton")
        >>> inspection.samples, inspection.jpegs, inspection.raws
        (32, 0, 32)
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
    field_bytes: dict[str, Spread]
    masks: dict[str, MaskPixels]
    checked: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the content in plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.samples:,} samples, {self.size / 1e6:,.1f} MB, pages of {self.page_size >> 20} MiB",
            f"  stored: {self.jpegs:,} JPEG, {self.raws:,} raw",
            f"  fields: {', '.join(f'{name} ({kind})' for name, kind in self.fields.items())}",
            f"  width:  {self.width} pixels",
            f"  height: {self.height} pixels",
            f"  image:  {self.image_bytes} bytes",
            *(f"  {name}: {spread} bytes" for name, spread in self.field_bytes.items()),
            *(line for name, pixels in self.masks.items() for line in pixels.lines(name, self.samples)),
            f"  checksums: {'yes' if self.checked else 'none (no manifest)'}",
        ]
        if self.classes:
            counts = np.array(list(self.classes.values()))
            what = "labels" if self.fields.get("label", "").startswith("ndarray") else "classes"
            lines.append(f"  {len(counts)} {what} of {Spread.of(counts)} samples")
            lines += _listed([f"{name}: {count:,}" for name, count in self.classes.items()])
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def inspect(path: str | Path) -> Inspection:
    """Read a file's tables, without decoding any image, and summarize its content. Up to 200 masks are decoded.

    Raises:
        BetonError: if the file's structure is damaged.

    Example::

        >>> inspect("train.beton").classes
        {'cat': 16, 'dog': 16}
    """
    beton = open_beton(path)
    encoded, columns = int((beton.modes == MODE_JPEG).sum()), beton.columns.items()
    blobs = [(name, column.sizes) for name, column in columns if column.field.kind in ("bytes", "json")]
    return Inspection(
        path=str(path),
        size=len(beton.data),
        page_size=beton.page_size,
        samples=len(beton),
        jpegs=encoded,
        raws=len(beton) - encoded,
        fields={name: str(column.field) for name, column in columns} | beton.targets,
        classes=_class_counts(beton),
        width=Spread.of(beton.widths),
        height=Spread.of(beton.heights),
        image_bytes=Spread.of(beton.sizes),
        field_bytes={name: Spread.of(sizes) for name, sizes in blobs},
        masks={name: _mask_pixels(beton, name) for name, kind in beton.targets.items() if kind == "mask"},
        checked=beton.checksums is not None,
    )


def _mask_pixels(beton: Beton, name: str) -> MaskPixels:
    chosen = np.linspace(0, len(beton) - 1, min(_MASKS, len(beton))).round().astype(int).tolist()
    counts, damaged = np.zeros(1 << 16, dtype=np.int64), 0
    for number in chosen:
        try:
            counts += np.bincount(beton.mask(name, number).ravel(), minlength=len(counts))
        except BetonError:
            damaged += 1
    names = _distinct(beton.classes if name == beton.label_name else [])
    classes = {_class_name(index, names): int(counts[index]) for index in np.flatnonzero(counts).tolist()}
    return MaskPixels(len(chosen) - damaged, damaged, classes)


def _class_name(index: int, names: list[str]) -> str:
    if index < len(names):
        return names[index]
    return f"{index} (does not count)" if index == NOT_COUNTED else str(index)


def _class_counts(beton: Beton) -> dict[str, int]:
    kind, names = beton.fields[beton.label_name], beton.classes
    if kind not in ("int", "ndarray"):
        return {}
    labels = beton.labels
    if kind == "ndarray":
        if len(names) != labels.shape[-1] or not np.isin(labels, (0, 1)).all():
            return {}
        counts = labels.sum(axis=0, dtype=np.float64)  # in float32, it would end at 2**24
    elif names:
        counts = np.bincount(labels, minlength=len(names))
    else:
        numbers, counts = np.unique(labels, return_counts=True)
        names = [str(number) for number in numbers]
    return {name: int(count) for name, count in zip(_distinct(names), counts, strict=True)}


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names of classes, with the index where several have one: two of ImageNet are named crane."""
    often = Counter(names)
    return [f"{name} ({index})" if often[name] > 1 else name for index, name in enumerate(names)]


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        path: the file; `samples`: number of samples examined.
        bad: `(sample, reason)` of each sample that cannot be decoded or does not match its checksum.
        checked: whether there were checksums to compare with.

    Example::

        >>> verification = verify("train.beton", progress=False)
        >>> verification.samples, verification.bad
        (32, [])
    """

    path: str
    samples: int
    bad: list[tuple[int, str]]
    checked: bool

    @property
    def sound(self) -> bool:
        """Whether no sample is bad."""
        return not self.bad

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """Return the result as lines of text: the first of many bad samples, with `verbose` all."""
        checks = "structure, checksums and decoding" if self.checked else "structure and decoding (no checksums)"
        result = "all sound" if self.sound else f"{len(self.bad):,} bad"
        lines = [f"{self.path}: {self.samples:,} samples, {checks}: {result}"]
        bad = [f"  sample {number}: {reason}" for number, reason in self.bad]
        return "\n".join([*lines, *shortened(bad, verbose)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def verify(path: str | Path, *, workers: int | None = None, progress: bool = True) -> Verification:
    """Check a full file: its structure, every checksum, and every image and mask by decoding it.

    Masks must have the size of their image and no index without a class; boxes and keypoints must be finite numbers.

    Args:
        path: the file; its manifest, if there is one, has the checksums.
        workers: number of threads. Default None: one per available core.
        progress: whether to show a bar.

    Raises:
        DataError: for an invalid number of `workers`, or if the system refuses memory or threads.
        BetonError: if the structure is damaged, so that samples cannot be located.

    Example::

        >>> verify("train.beton", progress=False).sound
        True
    """
    threads = check_workers(workers)
    beton = open_beton(path)

    def faults(start: int) -> list[tuple[int, str]]:
        numbers = range(start, min(start + _CHUNK, len(beton)))
        return [(number, reason) for number in numbers if (reason := _fault(beton, number)) is not None]

    found = stoppable(
        faults, range(0, len(beton), _CHUNK), threads, "drivetrain-verify",
        title="Verifying", progress=progress, total=len(beton), wanted=f"{threads} threads",
    )  # fmt: skip
    with closing(found):
        bad = [one for some in found for one in some]
    return Verification(str(path), len(beton), bad, beton.checksums is not None)


def _fault(beton: Beton, number: int) -> str | None:
    """Return what is wrong with a sample; None if it is intact."""
    if not beton.is_unchanged(number):
        return "its checksum differs from the manifest's: its image or another field has changed"
    size = int(beton.heights[number]), int(beton.widths[number])
    if beton.modes[number] == MODE_JPEG and not jpegs.decodes(beton.stored(number), *size[::-1]):
        return "its JPEG data cannot be decoded"
    for name, kind in beton.targets.items():
        if (reason := _target_fault(beton, number, name, kind)) is not None:
            return reason
    for name, kind in beton.fields.items():
        if name == beton.image_name:
            continue
        try:
            values = beton.read(name, np.array([number])) if kind in ("json", "ndarray") else None
        except (ChangedError, ReadError):  # of the file, not of a sample
            raise
        except BetonError:
            return f"its field {name!r} is not valid JSON"
        if name == beton.label_name and values is not None and not np.isfinite(values).all():
            return "its label is not finite"
    return None


def _target_fault(beton: Beton, number: int, name: str, kind: str) -> str | None:
    try:
        (stored,) = beton.read(name, np.array([number]))
        if kind != "mask":
            coordinates(kind, stored)
            return None
        indices = decode_mask(stored, int(beton.heights[number]), int(beton.widths[number]))
        if name == beton.label_name and beton.classes:
            check_classes(indices, len(beton.classes))
    except (ChangedError, ReadError):
        raise
    except BetonError:
        return f"its field {name!r} is not valid JSON"
    except ValueError as error:
        return f"its {kind} {name!r}: {error}"
    return None


def _label_text(beton: Beton, number: int) -> str:
    """Return a label's class name, or its number or numbers; of a mask, the names of its classes, the largest first."""
    if beton.label_name in beton.targets:
        counts = np.bincount(beton.mask(beton.label_name, number).ravel())
        largest = sorted(np.flatnonzero(counts).tolist(), key=lambda index: -counts[index])
        return ", ".join(_class_name(index, beton.classes) for index in largest if index != NOT_COUNTED)
    label = beton.read(beton.label_name, np.array([number]))[0]
    if label.ndim:
        return " ".join(f"{value:.3g}" for value in label.ravel())
    return beton.classes[label] if beton.classes and label.dtype == np.int64 else f"{label:g}"


def _with_targets(beton: Beton, number: int) -> Image.Image:
    """Return a sample's image in RGB (of 16 bits the upper 8, of four channels the first three) with its masks in
    half-transparent colors, boxes as frames, and keypoints as dots."""
    pixels = beton.pixels(number)
    levels = pixels if beton.depth == 8 else (pixels >> 8).astype(np.uint8)
    levels = np.ascontiguousarray(levels[..., :3]) if levels.ndim == 3 else levels
    picture = Image.fromarray(levels).convert("RGB")
    for name, kind in beton.targets.items():
        if kind == "mask":
            colors = palette(beton.colors.get(name, ()))[beton.mask(name, number) & 255]
            picture = Image.blend(picture, Image.fromarray(colors), 0.5)
            continue
        draw, size = ImageDraw.Draw(picture), max(picture.size) // 64
        try:
            values = coordinates(kind, beton.read(name, np.array([number]))[0])
        except ValueError as error:
            raise beton.sample_error(number, f"its {kind} {name!r}: {error}") from None
        for each in values.clip(-1e6, 1e6).tolist():
            if kind == "boxes":
                draw.rectangle(each, outline="red", width=1 + size)
            else:
                (x, y), radius = each, 2 + size
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill="red")
    return picture


def contact_sheet(path: str | Path, out: str | Path, *, columns: int = 8, rows: int = 6, side: int = 128) -> None:
    """Write a PNG of pictures evenly sampled from the file, each with its index and label, and its targets drawn.

    Args:
        path: the `.beton` file.
        out: the picture to write, `.png`.
        columns, rows: size of the sheet, at most.
        side: of each picture, in pixels.

    Raises:
        BetonError: if the file is damaged; DataError: for an `out` that does not end in `.png`, and for invalid
            numbers.

    Example::

        >>> contact_sheet("train.beton", "sheet.png", columns=4, rows=2)
    """
    require_suffix(Path(out), ".png", DataError)
    for name, value, least in (("columns", columns, 1), ("rows", rows, 1), ("side", side, 16)):
        check_whole(name, plain(value), DataError, least)
    beton = open_beton(path)
    count = min(columns * rows, len(beton))
    chosen = np.linspace(0, len(beton) - 1, count).round().astype(int)
    sheet = Image.new("RGB", (min(columns, count) * side, -(-count // columns) * (side + 14)), "white")
    draw = ImageDraw.Draw(sheet)
    for place, number in enumerate(chosen):
        left, top = place % columns * side, place // columns * (side + 14)
        picture = _with_targets(beton, int(number))
        picture.thumbnail((side - 4, side - 4))
        sheet.paste(picture, (left + (side - picture.width) // 2, top + (side - picture.height) // 2))
        text = f"{number} {_label_text(beton, int(number))}"[: side // 6]
        draw.text((left + 3, top + side - 1), text, fill="black")
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    write_file(Path(out), buffer.getvalue())
