"""Conversion of a data set to one `.beton` file and its manifest."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from ...errors import DataError, require_suffix
from ..settings import check_workers
from .encode import Encoding
from .sampling import Job, encoded_samples, first_fields
from .sources import open_source
from .values import requested_fields
from .writer import write_beton


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        path: the `.beton` file.
        samples: number of samples in it.
        classes: class names in label order; empty if the source names none.
        fields: name to kind of each field in it, `image` and `label` first.
        how: how many images were stored in which way, e.g. `{"passed through": 390, "scaled down": 2}`.
        modes: how many are stored as `"jpg"` and as `"raw"` pixels.
        skipped: `(sample, reason)` of each that was left out (`on_error="skip"` only).
        size: of the file, in bytes.
        seconds: the conversion took.
    """

    path: Path
    samples: int
    classes: list[str]
    fields: dict[str, str]
    how: dict[str, int]
    modes: dict[str, int]
    skipped: list[tuple[str, str]]
    size: int
    seconds: float

    def __str__(self) -> str:
        ways = ", ".join(f"{count:,} {way}" for way, count in self.how.items())
        lines = [
            f"{self.path}: {self.samples:,} images ({ways}), {self.size / 1e6:,.1f} MB, "
            f"{self.samples / max(self.seconds, 1e-9):,.0f} images/s"
        ]
        if len(self.modes) > 1:
            lines.append(f"  stored: {self.modes['jpg']:,} JPEG, {self.modes['raw']:,} raw")
        if len(self.fields) > 2:
            lines.append(f"  fields: {', '.join(f'{name} ({kind})' for name, kind in self.fields.items())}")
        lines += [f"  left out {name}: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        return asdict(self) | {"path": str(self.path)}


def convert(
    source: Any,
    out: str | Path,
    *,
    fields: Sequence[str] | Mapping[str, str | None] | None = None,
    max_resolution: int | None = None,
    min_resolution: int | None = None,
    quality: int = 90,
    write_mode: str = "auto",
    smart_threshold: int | None = None,
    compress_probability: float = 0.5,
    check: Literal["decode", "structure"] = "decode",
    workers: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    classes: Sequence[str] | None = None,
    progress: bool = True,
) -> ConvertReport:
    """Converts a data set to a `.beton` file that FFCV (and `FFCVLoader`) reads.

    Labels are ints (classes), floats (targets) or vectors, stored as float32 `(K,)`.

    Args:
        source: a folder `CLASS/image.jpg`, in which names that begin with a dot, and `__MACOSX`, are left out;
            WebDataset shards (a path or pattern such as `train-{000..003}.tar`, or a list of them); a pair of
            arrays `(images (N, H, W, 3) uint8, labels (N,) or (N, K))`; or an indexed data set of
            `(image, label, …)` or of dicts.
        out: the `.beton` file to write, replaced if it is there; its manifest goes beside it, with
            `.json` after the name, and the two prove that they belong together. The same bytes for any number of
            workers. Of several conversions to one name at a time, the last to finish wins.
        fields: further fields by name, or name to kind: int, float, ndarray, bytes, json or None; by
            name alone, or with None, the first sample's value decides. Of dicts: their keys; of tuples: what follows
            (image, label); of shards: the members' extensions, e.g. `["json", "npy"]`.
        max_resolution: longest side in pixels; larger images are scaled down. None keeps all.
        min_resolution: shortest side in pixels to scale larger images down to; instead of
            `max_resolution`. None keeps all.
        quality: JPEG quality, 1–100, for images that must be encoded; JPEG files that need no change
            are copied byte for byte; those with arithmetic codes get Huffman codes, without loss. 90 is FFCV's default.
        write_mode: `"auto"`: JPEG files as JPEGs, other images raw up to 64 × 64 pixels, else as
            JPEGs. The others as in FFCV: `"jpg"`, `"raw"` (pixels), `"smart"` (JPEG above
            `smart_threshold`), `"proportion"` (JPEG with `compress_probability`).
        smart_threshold: bytes of pixels above which mode "smart" makes a JPEG; None: never.
        compress_probability: of a JPEG in mode "proportion"; drawn from the sample's number alone, so
            that it is the same in every run. 0.5 is FFCV's default.
        check: what must be right of a JPEG file that is copied. `"decode"`: all of it, by decoding it once.
            `"structure"`: its header and its end, so that a truncated file is found, and a damaged one by
            `verify`, or by the loader; more than twice as fast, for data that is known to be good.
        workers: threads that read and encode; None: one per available core.
        on_error: `"raise"` stops at the first bad image; `"skip"` leaves it out and reports it.
        classes: names of the classes in label order, where the source has none (arrays, shards);
            None: the source's.
        progress: show a bar with images/s and the time left.

    Raises:
        DataError: for a source, image or value that cannot be used, naming it, or an `out` that does not end
            in `.beton`. No file is left behind.
        DrivetrainError: if the file cannot be written.
    """
    out, start = Path(out), perf_counter()
    encoding = Encoding(
        max_resolution, min_resolution, quality, write_mode, smart_threshold, compress_probability, check
    )
    _check_arguments(out, on_error)
    threads = check_workers(workers)
    wanted = requested_fields(fields)
    samples = open_source(source, list(wanted))
    if len(samples) == 0:
        raise DataError(f"The {samples.kind} holds no samples; there is nothing to convert.")
    job = Job(samples, encoding, first_fields(samples, wanted, on_error), on_error)
    names = list(classes or samples.classes)
    named = f" {source}" if isinstance(source, str | Path) else ""
    about = {
        "classes": names,
        "source": samples.kind + named,
        "settings": asdict(encoding),
        "drivetrain": _version(),
    }
    encoded = encoded_samples(job, threads, progress)
    try:
        written = write_beton(out, encoded, len(samples), job.fields, about)
    finally:
        encoded.close()
    return ConvertReport(
        path=out,
        samples=written.manifest["samples"],
        classes=names,
        fields=written.manifest["fields"],
        how=dict(written.how.most_common()),
        modes=dict(written.modes),
        skipped=[(sample.name, sample.reason) for sample in written.skipped],
        size=written.size,
        seconds=perf_counter() - start,
    )


def _version() -> str | None:
    """Of Drivetrain; None where it runs from a folder that is not installed."""
    try:
        return version("drivetrain")
    except PackageNotFoundError:
        return None


def _check_arguments(out: Path, on_error: str) -> None:
    if on_error not in ("raise", "skip"):
        raise DataError(f"on_error={on_error!r} must be 'raise' or 'skip'.")
    if out.is_dir():
        raise DataError(f"{out} is a folder; name the file to write, e.g. {out / 'train.beton'}.")
    require_suffix(out, ".beton", DataError)
    if out.exists() and not out.is_file():
        raise DataError(f"{out} is not an ordinary file and will not be replaced; name another.")
    if not out.parent.is_dir():
        raise DataError(f"The folder {out.parent} does not exist; make it first.")
