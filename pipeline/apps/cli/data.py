"""The data commands: `drivetrain convert | inspect | verify | advise`."""

import os
from pathlib import Path
from typing import Any

import click

from ....common.errors import DataError
from ....loaders.sources import expand
from .options import FILES, Command, File, Place, Text, argument, option, quiet, workers

beton = argument("file", "A .beton file, its address, or several: 'train-{000..127}.beton' (quoted).", FILES)
verbose = option("--verbose", "Print long lists in full.")


@click.command(cls=Command)
@argument(
    "source",
    "Folder with one folder of images per class, or WebDataset shards such as 'train-{000..127}.tar' (quoted).",
    FILES,
)
@argument("out", "The .beton file to write, or several: 'train-{000..127}.beton' (quoted).", Place())
@option(
    "--labels PATH",
    "CSV with a header and a row per image: its path in the folder, then its class, or numbers (0 and 1 for "
    "labels); or the folder of their masks, PNGs with the images' names. Default: the folders are the classes.",
    File(),
)
@option(
    "--classes NAMES",
    "Class names in label order, for shards, masks, and the names in a CSV: A,B,C; or a text file, one per line.",
    FILES,
)
@option(
    "--ignore VALUE", "A value of the masks that does not count: 255 is stored. May be repeated.", int, multiple=True
)
@option("--map OLD:NEW", "Replace a value of the masks by another. May be repeated.", multiple=True)
@option("--max-resolution PIXELS", "Scale down to this longest side. Default: none.", int)
@option("--min-resolution PIXELS", "Scale down to this shortest side instead.", int)
@option("--quality N", "JPEG quality, 1-100, for images that must be encoded.", int, default=90)
@option(
    "--write-mode MODE", "auto: JPEGs as JPEG, small images raw. As in FFCV: jpg, raw, smart, proportion.",
    Text("auto", "jpg", "raw", "smart", "proportion"), default="auto",
)  # fmt: skip
@option("--smart-threshold BYTES", "Mode smart: encode images above this many raw bytes as JPEG.", int)
@option("--compress-probability P", "Mode proportion: fraction of images to encode as JPEG.", float, default=0.5)
@option(
    "--field NAME[=KIND]",
    "An additional field of the shards' samples, by extension, e.g. json or npy; with its kind: int, float, "
    "ndarray, bytes, json, mask, boxes or keypoints. May be repeated.",
    multiple=True,
)
@option(
    "--check CHECK",
    "Check of JPEGs that are copied. decode: read each fully; structure: only its two ends, twice as fast.",
    Text("decode", "structure"),
    default="decode",
)
@option("--optimize", "Give baseline JPEGs Huffman tables of their own: 4 % smaller, and 2.7 times as long.")
@option("--keep-bytes", "Copy JPEGs that need no change of their pixels byte for byte, also progressive ones.")
@option(
    "--image-mode MODE",
    "Channels and bits of the stored images, all of one size, as raw arrays. Default: RGB with 8 bits.",
    Text("L", "RGB", "RGBA", "I;16", "RGB;16", "RGBA;16"),
)
@option(
    "--engine ENGINE",
    "threads: the source as a whole. shards: each .tar shard to a file of its own, also from and to addresses; the "
    "same command continues. ray: likewise, on the machines of a Ray cluster.",
    Text("threads", "shards", "ray"), default="threads",
)  # fmt: skip
@workers
@option("--skip-bad", "Skip and list bad images instead of stopping.")
@quiet
@verbose
def convert(
    source: str, out: str | Path, field: tuple[str, ...], skip_bad: bool, classes: str | None, quiet: bool,
    verbose: bool, ignore: tuple[int, ...], map: tuple[str, ...], **options: Any,
) -> None:  # fmt: skip
    """Convert a folder of images, or tar shards, to a .beton file.

    JPEG files that are upright and small enough keep their pixels; progressive ones become baseline, without loss.
    The columns of --labels name the labels. In a folder, names that begin with a dot, and __MACOSX, are skipped. The
    file appears once it is complete, with a manifest of classes, settings and checksums (OUT.json).
    """
    from ....loaders import convert as run

    kinds = {name: kind or None for name, _, kind in (text.partition("=") for text in field)}
    if len(kinds) < len(field):
        raise DataError(f"--field names one field twice: {' '.join(field)}.")
    before = Path(out).exists()
    report = run(
        source, out, fields=kinds, on_error="skip" if skip_bad else "raise", classes=_class_names(classes),
        progress=not quiet, mask_map=_mask_map(ignore, map), **options,
    )  # fmt: skip
    text = report.text(verbose=verbose)
    print(text.partition("\n")[0] if quiet else text)
    if before and not quiet:
        print(f"An earlier {out} was replaced.")


def _mask_map(ignored: tuple[int, ...], pairs: tuple[str, ...]) -> dict[int, int] | None:
    changes = dict.fromkeys(ignored, 255)
    for pair in pairs:
        old, colon, new = pair.partition(":")
        if not (colon and old.isdecimal() and new.isdecimal()):
            raise DataError(f"--map {pair} must be two values of masks, such as 3:1.")
        if changes.setdefault(int(old), int(new)) != int(new):
            raise DataError(f"--map {pair}: {old} also becomes {changes[int(old)]}. Keep one of the two.")
    return changes or None


def _class_names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    lines = text.split(",")
    if os.path.isfile(text):  # noqa: PTH113 - pathlib raises for names that are too long for a path
        try:
            lines = Path(text).read_text(encoding="utf-8-sig").rstrip().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--classes {text} cannot be read as UTF-8 text: {error}.") from None
    elif len(lines) == 1 and text.lower().endswith((".txt", os.sep)):  # a mistyped path, and not the only class
        raise DataError(f"--classes {text} is not a file. Pass a text file with a name per line, or the names: A,B,C.")
    names = [line.strip() for line in lines]
    if "" in names:
        raise DataError(
            f"--classes {text}: class {names.index('')} has no name. Names are in label order, from class 0."
        )
    return names


@click.command(cls=Command)
@beton
@option("--sheet FILE", "Also write a contact sheet of the first file's images, as .png.", File())
def inspect(file: str, sheet: Path | None) -> None:
    """Print what a .beton file contains.

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


@click.command(cls=Command)
@beton
@workers
@quiet
@verbose
def verify(file: str, workers: int | None, quiet: bool, verbose: bool) -> int:
    """Verify a .beton file, every sample of it.

    Its structure is checked, every checksum, and every image and mask by decoding it.
    Bad samples are listed; the exit status is 1 if there are any.
    """
    from ....loaders import verify as run

    sound = True
    for one in expand(file):
        report = run(one, workers=workers, progress=not quiet)
        print(report.text(verbose=verbose))
        sound &= report.sound
    return 0 if sound else 1


@click.command(cls=Command)
@argument("source", "Folder with images anywhere below it, or a .beton file.", FILES)
@option("--image-size PIXELS", "Side of the loaded images.", int, default=224)
@option(
    "--wanted RATE",
    "Images/s that are enough: advise the smallest loss of quality that reaches them. Default: the fastest.",
    float,
)
@option("--samples N", "Images to measure; fewer if the time does not suffice.", int, default=300)
@option("--seconds SECONDS", "Time for everything.", float, default=60)
@workers
@option(
    "--scratch FOLDER",
    "Folder for the temporary files, on the disk for the data set. Default: the system's temporary folder.",
    File(),
)
@option("--json", "Print a JSON object, with the quartiles.", name="as_json")
@quiet
def advise(source: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Measure which format and resolution loads fastest here.

    A sample of the images is converted in several ways, each of which is loaded from memory, with one and with all
    workers, and read from disk, in interleaved rounds. The temporary files are removed at the end, also after Ctrl-C.
    """
    from ....common.storage.json_files import to_json
    from ....loaders import advise as run

    advice = run(source, progress=not quiet, **options)
    print(to_json(advice.to_dict()) if as_json else advice)
