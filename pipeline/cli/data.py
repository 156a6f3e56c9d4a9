"""The commands of the command line that are about data: `drivetrain convert | inspect | verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from ...errors import DataError


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder with one folder of images per class, or WebDataset shards such as "
            "'train-{000..127}.tar' (quoted)."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The .beton file to write.")],
    max_resolution: Annotated[
        int | None, typer.Option(help="Scale images down to this longest side, in pixels. Default: keep all.")
    ] = None,
    min_resolution: Annotated[
        int | None, typer.Option(help="Scale images down to this shortest side instead, in pixels.")
    ] = None,
    quality: Annotated[int, typer.Option(help="JPEG quality, 1-100, for images that must be encoded.")] = 90,
    write_mode: Annotated[
        str,
        typer.Option(
            help="auto: JPEGs as they are, small images raw. Or as in FFCV: jpg, raw, smart, proportion."
        ),
    ] = "auto",
    smart_threshold: Annotated[
        int | None, typer.Option(help="Mode smart makes a JPEG of more than so many bytes of pixels.")
    ] = None,
    compress_probability: Annotated[float, typer.Option(help="Share of JPEGs in mode proportion.")] = 0.5,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=KIND]",
            help="A further field of a shard's samples by extension, e.g. json or npy; with its kind: int, "
            "float, ndarray, bytes or json. May be repeated.",
        ),
    ] = None,
    check: Annotated[
        str,
        typer.Option(
            help="Of JPEGs that are copied: decode reads all of each; structure only its beginning and end, "
            "twice as fast."
        ),
    ] = "decode",
    workers: Annotated[int | None, typer.Option(help="Threads. Default: one per core.")] = None,
    skip_bad: Annotated[
        bool, typer.Option(help="Leave bad images out and list them, instead of stopping.")
    ] = False,
) -> None:
    """Converts a folder of images, or tar shards, to FFCV's .beton format.

    JPEG files that need no change are copied byte for byte; names that begin with a dot, and __MACOSX, are left
    out of a folder. The file appears when it is complete; a
    manifest with classes, settings and checksums goes beside it (OUT.json).
    """
    from ...loaders import convert as run

    kinds = {name: kind or None for name, _, kind in (text.partition("=") for text in field or [])}
    if len(kinds) < len(field or []):
        raise DataError(f"--field names one field twice: {' '.join(field or [])}.")
    report = run(
        source, out, fields=kinds, max_resolution=max_resolution, min_resolution=min_resolution, quality=quality,
        write_mode=write_mode, smart_threshold=smart_threshold, compress_probability=compress_probability,
        check=cast(Literal["decode", "structure"], check),
        workers=workers, on_error="skip" if skip_bad else "raise",
    )  # fmt: skip
    print(report)


def inspect(
    file: Annotated[Path, typer.Argument(help="A .beton file.")],
    sheet: Annotated[
        Path | None, typer.Option(help="Also write a contact sheet of pictures spread over the file, a .png.")
    ] = None,
) -> None:
    """Says what a .beton file holds: fields, counts, classes, sizes.

    Reads the tables only, so that it takes no longer for a large file.
    """
    from ...loaders import contact_sheet
    from ...loaders import inspect as run

    print(run(file))
    if sheet is not None:
        contact_sheet(file, sheet)
        print(sheet)


def verify(
    file: Annotated[Path, typer.Argument(help="A .beton file.")],
    workers: Annotated[int | None, typer.Option(help="Threads. Default: one per core.")] = None,
) -> None:
    """Examines a .beton file whole: its structure, every checksum, every image by decoding it.

    Lists the bad samples and exits with status 1 if there are any.
    """
    from ...loaders import verify as run

    found = run(file, workers=workers)
    print(found)
    raise typer.Exit(0 if found.sound else 1)
