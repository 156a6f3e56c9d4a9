"""`convert`: its options, and which engine does the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ...common.errors import DataError
from ...common.storage.addresses import is_address
from ..options import check_workers
from .encode import Encoding
from .shards import convert_shards
from .single import Choices, ConvertReport, convert_here
from .values import check_mask_map, requested_classes, requested_fields

__all__ = ["ConvertReport", "convert"]

ENGINES = ("threads", "shards", "ray")


def convert(
    source: Any,
    out: str | Path,
    *,
    labels: str | Path | None = None,
    fields: Sequence[str] | Mapping[str, str | None] | None = None,
    max_resolution: int | None = None,
    min_resolution: int | None = None,
    quality: int = 90,
    write_mode: str = "auto",
    smart_threshold: int | None = None,
    compress_probability: float = 0.5,
    check: Literal["decode", "structure"] = "decode",
    optimize: bool = False,
    keep_bytes: bool = False,
    image_mode: str | None = None,
    workers: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    classes: Sequence[str] | None = None,
    mask_map: Mapping[int, int] | None = None,
    engine: Literal["threads", "shards", "ray"] = "threads",
    progress: bool = True,
) -> ConvertReport:
    """Convert a data set to a `.beton` file that FFCV and `FFCVLoader` can read.

    Labels are ints (class indices), floats (targets), vectors, stored as float32 `(K,)`, or masks: one class index per
    pixel, as a Pillow image of mode P, L, 1 or I;16, or integers `(H, W)`, 0 to 65535. The first sample decides. Masks,
    boxes and keypoints are those of the upright picture (EXIF), and are scaled with it.

    Args:
        source: a folder `CLASS/image.jpg`, in which names that begin with a dot, and `__MACOSX`, are ignored;
            WebDataset shards (a path or pattern such as `train-{000..003}.tar`, or a list of them); a pair of
            arrays `(images (N, H, W, 3) uint8, labels (N,), (N, K) or (N, H, W))`; or an indexable data set of
            `(image, label, …)` or of dicts. For other images, see `image_mode`.
        out: the `.beton` file to write; an existing one is replaced. A pattern such as `train-{000..127}.beton` names
            several files, which get equal numbers of samples, in order, and appear together at the end. A file's
            manifest is written next to it, with `.json` appended to the name; a seal ties the two together. The file
            does not depend on the number of workers. If several conversions write to one name at a time, the last to
            finish wins.
        labels: for a folder, a CSV file with a header and one row per image: its path in the folder, then class names
            (one column of text), class indices (one of integers), a target (one of numbers), or several labels of 0
            and 1, or targets (several columns, whose names are kept as class names). The folders in it are then not
            classes, and images may lie anywhere. Or a folder of masks: for each image, a PNG of the same name in the
            same subfolder, with `.png` as its suffix. Default None: the folders are the classes.
        fields: further fields, as a list of names or a mapping of names to kinds: int, float, ndarray, bytes, json,
            mask, boxes, keypoints or None. Without a kind, or with None, it is inferred from the first sample's value,
            but never one of the last three. Boxes are `(n, 4)`, left, top, right, bottom in pixels, and keypoints
            `(n, 2)`, x, y, any number per image. For dicts: their keys; for tuples: the items after (image, label);
            for shards: the members' extensions, e.g. `["json", "npy"]`, or `{"boxes.json": "boxes"}`.
        max_resolution: longest side in pixels; larger images are scaled down. Default None: no limit.
        min_resolution: shortest side in pixels to scale larger images down to; use it instead of
            `max_resolution`. Default None: no limit.
        quality: JPEG quality, 1–100, for images that must be encoded. Default 90, as in FFCV. JPEG files that are RGB,
            upright and small enough keep their pixels: progressive ones, and those with arithmetic codes, are recoded
            losslessly as baseline, which loads faster and drops EXIF data, color profiles and comments; others are
            copied byte for byte.
        write_mode: `"auto"`: JPEG files as JPEG; other images raw up to 64 × 64 pixels, else as JPEG. The others
            are FFCV's: `"jpg"`, `"raw"` (pixels), `"smart"` (JPEG above `smart_threshold`), `"proportion"` (JPEG
            with `compress_probability`).
        smart_threshold: size in bytes of the raw pixels above which mode "smart" stores a JPEG. Default None: never.
        compress_probability: probability of a JPEG in mode "proportion"; the draw depends only on the sample's
            index, so it is the same in every run. Default 0.5, as in FFCV.
        check: how to check a JPEG file that is copied. `"decode"` (default) decodes it once. `"structure"` checks its
            header and its end: truncation is detected here, other damage only by `verify` or the loader. It is more
            than twice as fast; use it for data known to be good.
        optimize: whether baseline JPEGs get Huffman tables of their own where this makes them smaller, without loss.
            Default False: photographs are 4 % smaller then, load no faster, and take 2.7 times as long to convert.
        keep_bytes: whether to copy every JPEG that the loader's decoder reads and that needs no change of its pixels
            byte for byte, also progressive ones and those with arithmetic codes. Default False.
        image_mode: channels and bits of the stored images, by Pillow's names: `"L"` (one channel), `"RGBA"` (four),
            `"I;16"` (one of 16 bits), `"RGB;16"` or `"RGBA;16"` (of 16 bits; only from uint16 arrays, which Pillow
            cannot represent). They are stored as raw arrays and must all have one size. Channels of 8-bit images are
            converted; an image with other bits is an error. Default None, or `"RGB"`: everything becomes RGB with 8
            bits.
        workers: number of threads that read and encode. Default None: one per available core; with engine `"ray"`, one
            per shard.
        on_error: `"raise"` stops at the first bad image; `"skip"` skips and reports it.
        classes: class names in label order, for sources without names (arrays, shards), or for the names in
            `labels`. For a folder, or torchvision's `ImageFolder` of one, they may be more than it has, as of
            validation data that lacks a class: each folder has the index of its name. Those of masks name their
            indices; 255, for pixels that do not count, needs none. Default None: the source's, but none for masks, and
            for labels that a data set transforms (`target_transform`).
        mask_map: values of masks to replace, old to new, in the labels and in further fields of kind mask; all at
            once, so `{1: 2, 2: 1}` exchanges two. `{11: 255}`: pixels of class 11 do not count. The classes are those
            after it. Of masks with a palette, values are the indices. Their colors are kept in the manifest, for
            pictures of masks and predictions: of each class, that of the first mask with it. Default None: none.
        engine: `"threads"` (default) converts any source, as a whole. `"shards"` makes a file of each `.tar` shard, one
            after the other: `out` names as many. `source` and `out` may be addresses then, such as
            `s3://bucket/train-{000..127}.tar`; then two shards and two files at most are in the folder for
            temporary files (`TMPDIR`). Each file is complete at once; the same call again converts only shards whose
            file is missing, or was made of another shard or with other options. `"ray"` does the same in parallel, on
            the machines of the Ray cluster that runs, else on this one (extra `ray`); a shard takes `workers` of its
            CPUs. Paths must be the same on all machines.
        progress: whether to show a bar with images/s and the time left.

    Raises:
        DataError: for an unusable source, image or value, naming it; for an `out` that does not end in `.beton`; or
            if the system refuses memory or threads. No file is left behind.
        DrivetrainError: if the file cannot be written.

    Example::

        >>> report = convert("photos", "photos.beton", max_resolution=400, progress=False)
        >>> report.samples, report.classes
        (4, ['cat', 'dog'])
    """
    encoding = Encoding(
        max_resolution, min_resolution, quality, write_mode, smart_threshold, compress_probability, check,
        optimize, keep_bytes, image_mode,
    )  # fmt: skip
    if on_error not in ("raise", "skip"):
        raise DataError(f"on_error={on_error!r} must be 'raise' or 'skip'.")
    names = requested_classes(classes)
    choices = Choices(encoding, requested_fields(fields), labels, names, check_mask_map(mask_map), on_error)
    if engine not in ENGINES:
        raise DataError(f"engine={engine!r} must be {', '.join(map(repr, ENGINES))}.")
    if engine == "threads":
        sources = source if isinstance(source, list | tuple) else (source,)
        if found := [place for place in (*sources, str(out)) if is_address(place)]:
            raise DataError(
                f"{found[0]} is an address. engine='shards' (--engine shards) reads .tar shards from addresses, and "
                "writes files to them; or copy it to this machine."
            )
        return convert_here(source, out, choices, check_workers(workers), progress)
    return convert_shards(source, out, choices, engine, workers, progress)
