"""The data commands: `drivetrain convert | inspect | verify | advise`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

from ....common.errors import DataError
from ....loaders.sources import expand
from .parser import Quiet, Verbose

Beton = Annotated[
    str, "A .beton file, its address, or several: 'train-{000..127}.beton' (quoted).", None, "files"
]
WRITE_MODES = ("auto", "jpg", "raw", "smart", "proportion")
Threads = Annotated[int | None, "Threads. Default: one per core.", "N"]


def convert(
    source: Annotated[
        str,
        "Folder with one folder of images per class, or WebDataset shards such as 'train-{000..127}.tar' (quoted).",
        None,
        "files",
    ],
    out: Annotated[Path, "The .beton file to write, or several: 'train-{000..127}.beton' (quoted)."],
    *,
    labels: Annotated[
        Path | None,
        "CSV with a header and a row per image: its path in the folder, then its class, or numbers (0 and 1 for "
        "labels); or the folder of their masks, PNGs with the images' names. Default: the folders are the classes.",
        "PATH",
    ] = None,
    classes: Annotated[
        str | None,
        "Class names in label order, for shards, masks, and the names in a CSV: A,B,C; or a text file, one per line.",
        "NAMES",
        "files",
    ] = None,
    max_resolution: Annotated[int | None, "Scale down to this longest side. Default: none.", "PIXELS"] = None,
    min_resolution: Annotated[int | None, "Scale down to this shortest side instead.", "PIXELS"] = None,
    quality: Annotated[int, "JPEG quality, 1-100, for images that must be encoded."] = 90,
    write_mode: Annotated[
        str,
        "auto: JPEGs as JPEG, small images raw. As in FFCV: jpg, raw, smart, proportion.",
        "MODE",
        WRITE_MODES,
    ] = "auto",
    smart_threshold: Annotated[
        int | None, "Mode smart: encode images above this many raw bytes as JPEG.", "BYTES"
    ] = None,
    compress_probability: Annotated[
        float, "Mode proportion: fraction of images to encode as JPEG.", "P"
    ] = 0.5,
    field: Annotated[
        Sequence[str],
        "An additional field of the shards' samples, by extension, e.g. json or npy; with its kind: int, float, "
        "ndarray, bytes, json, mask, boxes or keypoints. May be repeated.",
        "NAME[=KIND]",
    ] = (),
    check: Annotated[
        str,
        "Check of JPEGs that are copied. decode: read each fully; structure: only its two ends, twice as fast.",
        None,
        ("decode", "structure"),
    ] = "decode",
    optimize: Annotated[
        bool, "Give baseline JPEGs Huffman tables of their own: 4 % smaller, and 2.7 times as long."
    ] = False,
    keep_bytes: Annotated[
        bool, "Copy JPEGs that need no change of their pixels byte for byte, also progressive ones."
    ] = False,
    image_mode: Annotated[
        str | None,
        "Channels and bits of the stored images, all of one size, as raw arrays. Default: RGB with 8 bits.",
        "MODE",
        ("L", "RGB", "RGBA", "I;16", "RGB;16", "RGBA;16"),
    ] = None,
    workers: Threads = None,
    skip_bad: Annotated[bool, "Skip and list bad images instead of stopping."] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Convert a folder of images, or tar shards, to FFCV's .beton format.

    JPEG files that are upright and small enough keep their pixels; progressive ones become baseline, without loss.
    The columns of --labels name the labels.
    In a folder, names that begin with a dot, and __MACOSX,
    are skipped. The file appears once it is complete, with a manifest of classes, settings and checksums (OUT.json).
    """
    from ....loaders import convert as run

    kinds = {name: kind or None for name, _, kind in (text.partition("=") for text in field)}
    if len(kinds) < len(field):
        raise DataError(f"--field names one field twice: {' '.join(field)}.")
    report = run(
        source, out, labels=labels, fields=kinds, max_resolution=max_resolution, min_resolution=min_resolution,
        quality=quality, write_mode=write_mode, smart_threshold=smart_threshold,
        compress_probability=compress_probability,
        check=cast(Literal["decode", "structure"], check),
        optimize=optimize, keep_bytes=keep_bytes, image_mode=image_mode, workers=workers,
        on_error="skip" if skip_bad else "raise", classes=_class_names(classes), progress=not quiet,
    )  # fmt: skip
    text = report.text(verbose=verbose)
    print(text.partition("\n")[0] if quiet else text)


def _class_names(text: str | None) -> list[str] | None:
    """Return class names given as `A,B,C`, or as a file with one per line; empty lines at its end are ignored."""
    if text is None:
        return None
    if not Path(text).is_file():
        names = [name.strip() for name in text.split(",")]
    else:
        try:
            names = [name.strip() for name in Path(text).read_text(encoding="utf-8").rstrip().split("\n")]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--classes {text} cannot be read as UTF-8 text: {error}.") from None
    if empty := [number for number, name in enumerate(names) if not name]:
        raise DataError(
            f"--classes {text}: class {empty[0]} has no name. Names are in label order, from class 0."
        )
    return names


def inspect(
    file: Beton,
    *,
    sheet: Annotated[Path | None, "Also write a contact sheet of the first file's images, as .png."] = None,
) -> None:
    """Print the contents of a .beton file: fields, counts, classes, sizes.

    Only the tables are read, and up to 200 masks, so a large file takes no longer.
    """
    from ....loaders import contact_sheet
    from ....loaders import inspect as run

    files = expand(file)
    for one in files:
        print(run(one))
    if sheet is not None:
        contact_sheet(files[0], sheet)
        print(sheet)


def verify(file: Beton, *, workers: Threads = None, quiet: Quiet = False, verbose: Verbose = False) -> int:
    """Verify a full .beton file: its structure, every checksum, and every image and mask by decoding it.

    Bad samples are listed; the exit status is 1 if there are any.
    """
    from ....loaders import verify as run

    sound = True
    for one in expand(file):
        report = run(one, workers=workers, progress=not quiet)
        print(report.text(verbose=verbose))
        sound &= report.sound
    return 0 if sound else 1


def advise(
    source: Annotated[str, "Folder with images anywhere below it, or a .beton file.", None, "files"],
    *,
    image_size: Annotated[int, "Side of the loaded images.", "PIXELS"] = 224,
    wanted: Annotated[
        float | None,
        "Images/s that are enough: advise the smallest loss of quality that reaches them. Default: the fastest.",
        "RATE",
    ] = None,
    samples: Annotated[int, "Images to measure; fewer if the time does not suffice.", "N"] = 300,
    seconds: Annotated[float, "Time for everything."] = 60,
    workers: Threads = None,
    scratch: Annotated[
        Path | None,
        "Folder for the temporary files, on the disk for the data set. Default: the system's temporary folder.",
        "FOLDER",
    ] = None,
    json: Annotated[bool, "Print a JSON object, with the quartiles."] = False,
    quiet: Quiet = False,
) -> None:
    """Measure which format and resolution loads how fast on this machine, and advise one.

    A sample of the images is converted in several ways, each of which is loaded from memory, with one and with all
    workers, and read from disk, in interleaved rounds. The temporary files are removed at the end, also after Ctrl-C.
    """
    from json import dumps

    from ....loaders import advise as run

    advice = run(
        source, image_size=image_size, wanted=wanted, samples=samples, seconds=seconds, workers=workers,
        scratch=scratch, progress=not quiet,
    )  # fmt: skip
    print(dumps(advice.to_dict(), ensure_ascii=False) if json else advice)
