"""Prints the memory that the decoder takes for many kinds of pictures, and what it was reckoned to take.

    loader_memory.py FOLDER

A line of JSON for each: its name, the bytes reckoned, the bytes taken, and whether all of the picture is decoded at its
own size, which is what is reckoned with. Needs Linux, and memory that goes back to the system when it is freed:
MALLOC_MMAP_THRESHOLD_=65536.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import native_fuzz
import numpy as np
import torch
from drivetrain.loaders import convert
from drivetrain.loaders.beton.data_set import open_files
from drivetrain.loaders.decode.decoder import Decoder
from drivetrain.loaders.options import LoaderOptions

SIZE = 900, 1200
BASELINE, RESTARTS, ARITHMETIC, PROGRESSIVE, ARITHMETIC_PROGRESSIVE, SEPARATE, MISSING = range(7)
SEVERAL_SCANS = {PROGRESSIVE, ARITHMETIC_PROGRESSIVE, SEPARATE, MISSING}
WHOLE = {"crop": "whole"}
EVALUATION = {"train": False, "eval_crop": "whole"}
CROPPED = {"scale": (0.1, 0.1), "ratio": (1.0, 1.0)}
JPEGS: dict[str, tuple[str, int, dict[str, Any]]] = {  # name: sampling, way, options
    "baseline 4:2:0": ("2211", BASELINE, WHOLE),
    "baseline 4:4:4": ("1111", BASELINE, WHOLE),
    "baseline 4:1:0": ("4211", BASELINE, WHOLE),
    "baseline 4:4:0": ("1211", BASELINE, WHOLE),
    "restarts": ("2211", RESTARTS, WHOLE),
    "arithmetic": ("2211", ARITHMETIC, WHOLE),
    "progressive": ("2211", PROGRESSIVE, WHOLE),
    "progressive 4:4:4": ("1111", PROGRESSIVE, WHOLE),
    "progressive arithmetic": ("2211", ARITHMETIC_PROGRESSIVE, WHOLE),
    "separate scans": ("2211", SEPARATE, WHOLE),
    "missing scans": ("2211", MISSING, WHOLE),
    "bicubic": ("2211", BASELINE, WHOLE | {"interpolation": "bicubic"}),
    "bicubic, small": ("2211", BASELINE, WHOLE | {"interpolation": "bicubic", "image_size": 64}),
    "area": ("2211", BASELINE, WHOLE | {"interpolation": "area"}),
    "nearest": ("2211", BASELINE, WHOLE | {"interpolation": "nearest"}),
    "evaluation": ("2211", BASELINE, EVALUATION),
    "evaluation, small": ("2211", BASELINE, EVALUATION | {"image_size": 64}),
    "evaluation, bicubic, progressive": ("2211", PROGRESSIVE, EVALUATION | {"interpolation": "bicubic"}),
    "policy": ("2211", BASELINE, WHOLE | {"policy": {"name": "trivial_augment"}}),
    "views": ("2211", BASELINE, WHOLE | {"views": 2}),
    "crop": ("2211", BASELINE, CROPPED),
    "crop, arithmetic": ("2211", ARITHMETIC, CROPPED),
    "crop, progressive, bicubic": ("2211", PROGRESSIVE, CROPPED | {"interpolation": "bicubic"}),
    "crop, progressive, small": ("2211", PROGRESSIVE, CROPPED | {"image_size": 64}),
    "crop, small": ("2211", BASELINE, CROPPED | {"image_size": 32}),
}
ARRAYS: dict[str, tuple[int, int, dict[str, Any]]] = {  # name: channels, bits, options
    "raw": (3, 8, WHOLE),
    "raw, bicubic": (3, 8, WHOLE | {"interpolation": "bicubic"}),
    "raw, bicubic, small": (3, 8, WHOLE | {"interpolation": "bicubic", "image_size": 64}),
    "raw, area": (3, 8, WHOLE | {"interpolation": "area"}),
    "raw, nearest": (3, 8, WHOLE | {"interpolation": "nearest"}),
    "raw, evaluation": (3, 8, EVALUATION),
    "raw, crop": (3, 8, CROPPED),
    "gray": (1, 8, WHOLE),
    "RGBA, evaluation": (4, 8, EVALUATION),
    "16 bits": (1, 16, WHOLE),
    "16 bits, RGB, bicubic": (3, 16, WHOLE | {"interpolation": "bicubic"}),
}
MODES = {(1, 8): "L", (4, 8): "RGBA", (1, 16): "I;16", (3, 16): "RGB;16"}


def jpegs(folder: Path) -> Iterator[tuple[str, Path, int, dict[str, Any]]]:
    for name, (sampling, way, options) in JPEGS.items():
        beton = folder / f"{sampling}-{way}.beton"
        if not beton.exists():
            (own := folder / f"{sampling}-{way}" / "a").mkdir(parents=True)
            native_fuzz.write_jpeg(own, SIZE, sampling, way)
            report = convert(own.parent, beton, keep_bytes=True, workers=1, progress=False)
            assert report.treatments == {"copied unchanged": 1}, report
        yield name, beton, way, options


def arrays(folder: Path) -> Iterator[tuple[str, Path, int, dict[str, Any]]]:
    for name, (channels, bits, options) in ARRAYS.items():
        beton = folder / f"{channels}-{bits}.beton"
        if not beton.exists():
            rng = np.random.default_rng(0)
            pixels = rng.integers(0, 1 << bits, (1, *SIZE, channels), np.uint8 if bits == 8 else np.uint16)
            mode = MODES.get((channels, bits))
            kind: dict[str, Any] = {"image_mode": mode} if mode else {"write_mode": "raw"}
            convert((pixels, np.zeros(1, np.int64)), beton, progress=False, **kind)
        yield name, beton, BASELINE, options | {"mean": (0.5,) * channels, "std": (0.2,) * channels}


def peak() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def coefficients(beton: Path, way: int) -> int:
    """The coefficients of a JPEG in several scans, which the decoder limits by themselves: two bytes for each."""
    if way not in SEVERAL_SCANS:
        return 0
    sampling = [int(factor) for factor in beton.name[:4]]
    wide, high = 8 * max(sampling[::2]), 8 * max(sampling[1::2])
    blocks = sampling[0] * sampling[1] + 2 * sampling[2] * sampling[3]
    return -(-SIZE[0] // high) * -(-SIZE[1] // wide) * blocks * 128


def taken(decoder: Decoder, images: torch.Tensor) -> int:
    """What the first loading takes at most. The memory for the images is not counted."""
    request = decoder.request(np.zeros(1, np.int64), 0, [images], np.zeros(1, np.int64), {})
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in use now
    before = peak()
    decoder.load(request, slice(0, 1))
    return peak() - before


def main(folder: Path) -> None:
    for name, beton, way, options in (*jpegs(folder), *arrays(folder)):
        settings = LoaderOptions(**{"batch_size": 1, "image_size": 500, "dtype": torch.float32, **options})
        data = open_files(beton)
        decoder = Decoder(data, settings, ())
        views = settings.views if settings.train else 1
        images = torch.zeros(1, views, *settings.size, data.channels)
        reckoned = decoder.workspace_bytes + coefficients(beton, way)
        full = "crop" not in name
        print(json.dumps([name, reckoned, taken(decoder, images), full]), flush=True)
        decoder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
