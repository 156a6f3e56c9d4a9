"""What the measurements of `advise` mean: the speed that each format reaches in training, and which format to take."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...common.table import Table
from ..image_size import size_text


@dataclass(frozen=True)
class Rate:
    """Images per second: the median of all rounds, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Rate:
        low, median, high = np.quantile(rounds, (0.25, 0.5, 0.75)).tolist()
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{_count(self.median)} ± {(self.high - self.low) / 2 / self.median:.0%}".replace("%", " %")


@dataclass(frozen=True)
class Row:
    """One format, with what was measured of it."""

    name: str  # in words
    options: dict[str, Any]  # of `convert`
    bytes_per_image: float  # mean, as stored in the file
    size: float  # of the data set in this format, in bytes, extrapolated from the sample
    pixels: float  # mean of the stored images
    reencoded: float  # fraction of the images that lose quality because they are compressed as JPEG again
    one_worker: Rate  # images per second of `FFCVLoader` with the file in memory
    all_workers: Rate
    disk: Rate | None  # images per second that are read, without decoding; None if it cannot be measured
    rate: float  # images per second in training, from the second epoch on; see `bound`
    bottleneck: str  # of that rate: "CPU" or "disk"
    fits: bool  # into the free memory

    @property
    def command(self) -> str:
        """The options of `drivetrain convert` for it."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.options.items())


def bound(loader: float, disk: float | None, size: float, memory: float) -> tuple[float, str]:
    """Return the images per second from the second epoch on, and the bottleneck, from the rates of loader and disk
    (None if unknown) and bytes. A data set that does not fit into the free memory is read in every epoch."""
    if size <= memory or disk is None or disk >= loader:
        return loader, "CPU"
    return disk, "disk"


def by_loss(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in order of the quality they lose: pixels first, then a second compression, then size."""
    return sorted(rows, key=lambda row: (-row.pixels, row.reencoded, row.size))


def choose(rows: Sequence[Row], wanted: float | None) -> Row:
    """Return the first row, in order of their loss, that reaches `wanted` images per second; else the fastest."""
    enough = (row for row in rows if wanted is not None and row.rate >= wanted)
    return next(enough, None) or max(rows, key=lambda row: row.rate)


@dataclass(frozen=True)
class Advice:
    """Formats for a data set, measured on this machine.

    Attributes:
        source: the data set; `images`: their number.
        sampled: number of images that were measured.
        unusable: number of sampled images that could not be read, and were left out.
        image_size: of the loaded images: height and width.
        workers: number of threads of "all workers".
        memory: free memory, in bytes.
        disk: reading speed of the disk with the folder `scratch`, in bytes per second; None if it cannot be measured.
        scratch: that folder.
        rounds: number of interleaved rounds; `seconds`: duration of everything.
        wanted: images per second that were asked for; None for the most.
        rows: the formats, in order of the quality they lose.
        left_out: names of formats that differ too little from another one.
    """

    source: str
    images: int
    sampled: int
    unusable: int
    image_size: tuple[int, int]
    workers: int
    memory: int
    disk: float | None
    scratch: str
    rounds: int
    seconds: float
    wanted: float | None
    rows: list[Row]
    left_out: list[str]

    @property
    def chosen(self) -> str:
        """Name of the advised format."""
        return choose(self.rows, self.wanted).name

    @property
    def advice(self) -> str:
        """Which format to take and why, in a few sentences."""
        return " ".join(_sentences(self.rows, self.wanted, self.memory, self.disk is not None))

    def table(self) -> Table:
        """Return the measurements as a table."""
        several = self.workers > 1
        heads = ["format", "per image", "data set", *(["1 worker"] if several else []),
                 f"{self.workers} worker{'s' * several}", "disk", "training", "bottleneck"]  # fmt: skip
        rows = [
            [
                row.name, bytes_text(row.bytes_per_image), bytes_text(row.size),
                *([str(row.one_worker)] if several else []), str(row.all_workers),
                "?" if row.disk is None else str(row.disk), _count(row.rate), row.bottleneck,
            ]
            for row in self.rows
        ]  # fmt: skip
        size = size_text(self.image_size)
        title = f"{self.source}: {self.images:,} images, loaded as random crops of {size} pixels"
        return Table(heads, rows, title, self._caption(), figures=True)

    def _caption(self) -> str:
        disk = "its speed cannot be measured" if self.disk is None else f"{bytes_text(self.disk)}/s"
        lines = [
            f"Images/s: median ± half the distance of the quartiles, {self.rounds} interleaved "
            f"round{'s' * (self.rounds != 1)} with {self.sampled:,} images. Training: from the second epoch on. "
            f"Free memory: {bytes_text(self.memory)}. Disk of {self.scratch}, read image by image: {disk}."
        ]
        if self.unusable:
            lines.append(f"{self.unusable:,} images of the sample cannot be read, and were left out.")
        if self.left_out:
            lines.append(f"Left out, because they change too little: {'; '.join(self.left_out)}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.table()}\n{self.advice}"

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements and the advice in plain JSON types."""
        derived = {"image_size": list(self.image_size), "chosen": self.chosen, "advice": self.advice}
        return asdict(self) | derived

    def _repr_html_(self) -> str:
        return f"{self.table().html()}<p>{html.escape(self.advice)}</p>"


def _sentences(rows: Sequence[Row], wanted: float | None, memory: float, known: bool) -> list[str]:
    row, first = choose(rows, wanted), rows[0]
    what = f"'{row.name}' ({row.command})" if row.options else f"'{row.name}'"
    limit = f"the {row.bottleneck} is the bottleneck"
    if wanted is None:
        said = [f"{what} is the fastest with {_count(row.rate)} images/s; {limit}."]
        if row is not first:
            said.append(
                f"That is {row.rate / first.rate:.2g} times the rate of '{first.name}', at {row.size / first.size:.2g} "
                f"times the size. A model that trains at less than {_count(first.rate)} images/s gains nothing "
                "from it (--wanted)."
            )
    elif row.rate >= wanted:
        reach = f"of the formats that reach {_count(wanted)} images/s: {_count(row.rate)}"
        said = [f"{what} loses the least quality {reach}."]
        if row is not first:
            slower = f"'{first.name}' reaches {_count(first.rate)}"
            said.append(f"{slower}: there the {first.bottleneck} is the bottleneck.")
    else:
        more = f"Use a faster disk, or {bytes_text(row.size)} of free memory"
        if row.bottleneck == "CPU":
            more = "Use more cores, or smaller images"
        fastest = f"{what} is the fastest with {_count(row.rate)}; {limit}. {more}."
        said = [f"No format reaches {_count(wanted)} images/s. {fastest}"]
    if not row.fits:
        result = "so each epoch reads it from disk" if known else "and the speed of its disk is unknown (--scratch)"
        memory_text = f"the free memory ({bytes_text(memory)})"
        said.append(f"The data set ({bytes_text(row.size)}) does not fit into {memory_text}, {result}.")
    return said


def _count(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def bytes_text(size: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if size >= 99.5 or unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB" if size < 999.5 else f"{size:,.0f} TB"
