"""The commands about data: `drivetrain convert | inspect | verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

from ...errors import DataError

Beton = Annotated[Path, "A .beton file."]
Threads = Annotated[int | None, "Threads. Default: one per core.", "N"]


def convert(
    source: Annotated[
        str,
        "Folder with one folder of images per class, or WebDataset shards such as 'train-{000..127}.tar' (quoted).",
    ],
    out: Annotated[Path, "The .beton file to write."],
    *,
    max_resolution: Annotated[int | None, "Scale down to this longest side. Default: none.", "PIXELS"] = None,
    min_resolution: Annotated[int | None, "Scale down to this shortest side instead.", "PIXELS"] = None,
    quality: Annotated[int, "JPEG quality, 1-100, for images that must be encoded."] = 90,
    write_mode: Annotated[
        str, "auto: JPEGs as they are, small images raw. As in FFCV: jpg, raw, smart, proportion.", "MODE"
    ] = "auto",
    smart_threshold: Annotated[
        int | None, "Mode smart makes a JPEG of more than so many bytes of pixels.", "BYTES"
    ] = None,
    compress_probability: Annotated[float, "Share of JPEGs in mode proportion.", "P"] = 0.5,
    field: Annotated[
        Sequence[str],
        "A further field of a shard's samples by extension, e.g. json or npy; with its kind: int, float, ndarray, "
        "bytes or json. May be repeated.",
        "NAME[=KIND]",
    ] = (),
    check: Annotated[
        str, "Of JPEGs that are copied: decode reads all of each; structure only its two ends, twice as fast."
    ] = "decode",
    workers: Threads = None,
    skip_bad: Annotated[bool, "Leave bad images out and list them, instead of stopping."] = False,
) -> None:
    """Convert a folder of images, or tar shards, to FFCV's .beton format.

    JPEG files that need no change are copied byte for byte; names that begin with a dot, and __MACOSX, are left
    out of a folder. The file appears when it is complete; a manifest with classes, settings and checksums goes
    beside it (OUT.json).
    """
    from ...loaders import convert as run

    kinds = {name: kind or None for name, _, kind in (text.partition("=") for text in field)}
    if len(kinds) < len(field):
        raise DataError(f"--field names one field twice: {' '.join(field)}.")
    report = run(
        source, out, fields=kinds, max_resolution=max_resolution, min_resolution=min_resolution, quality=quality,
        write_mode=write_mode, smart_threshold=smart_threshold, compress_probability=compress_probability,
        check=cast(Literal["decode", "structure"], check),
        workers=workers, on_error="skip" if skip_bad else "raise",
    )  # fmt: skip
    print(report)


def inspect(
    file: Beton, *, sheet: Annotated[Path | None, "Also write a contact sheet of pictures, a .png."] = None
) -> None:
    """Print what a .beton file holds: fields, counts, classes, sizes.

    Only its tables are read, which takes no longer for a large file.
    """
    from ...loaders import contact_sheet
    from ...loaders import inspect as run

    print(run(file))
    if sheet is not None:
        contact_sheet(file, sheet)
        print(sheet)


def verify(file: Beton, *, workers: Threads = None) -> int:
    """Examine a .beton file whole: its structure, every checksum, every image by decoding it.

    Bad samples are listed; the exit status is 1 if there are any.
    """
    from ...loaders import verify as run

    found = run(file, workers=workers)
    print(found)
    return 0 if found.sound else 1
