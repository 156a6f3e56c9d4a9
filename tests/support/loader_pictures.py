"""Small pictures and `.beton` files for the tests of `loaders/`, made from seeds."""

import io
import os
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import process_state
import pytest
import torch
from drivetrain.common.errors import DataError
from drivetrain.loaders import Beton, TorchLoader, convert, open_beton
from numpy.typing import NDArray
from PIL import Image
from places import SUPPORT

PNG = b"\x89PNG\r\n\x1a\n"


def picture(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    """A smooth color picture `(H, W, 3)`: waves of random direction, so that JPEG keeps it well."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    channels = []
    for _ in range(3):
        waves = [
            np.sin(2 * np.pi * (rng.uniform(-3, 3) * x + rng.uniform(-3, 3) * y) + rng.uniform(0, 6.3))
            for _ in range(3)
        ]
        channels.append(127.5 + 42 * sum(waves))
    return np.stack(channels, axis=2).clip(0, 255).astype(np.uint8)


def file_bytes(image: Any, form: str, **options: Any) -> bytes:
    """Return an image of Pillow's, or pixels, as a file of this format; `options` are Pillow's."""
    buffer = io.BytesIO()
    _pillow(image).save(buffer, form, **options)
    return buffer.getvalue()


def _pillow(image: Any) -> Image.Image:
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image


def jpeg_bytes(image: Any, **options: Any) -> bytes:
    """Return a JPEG file, with a default quality of 92."""
    return file_bytes(image, "JPEG", **{"quality": 92, **options})


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(bits: int, color: int, width: int, height: int, lines: bytes) -> bytes:
    """Return a PNG file of any kind; `lines` as they are before compression, each with its filter."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    return PNG + header + png_chunk(b"IDAT", zlib.compress(lines)) + png_chunk(b"IEND", b"")


def image_folder(root: Path, images: Mapping[str, Any]) -> Path:
    """A folder of one class, `a`: files by name, from their bytes, an image of Pillow's, or pixels."""
    (root / "a").mkdir(parents=True)
    for name, image in images.items():
        if isinstance(image, bytes):
            (root / "a" / name).write_bytes(image)
        else:
            _pillow(image).save(root / "a" / name)
    return root


def jpeg_folder(root: Path, per_class: int = 6, classes: tuple[str, ...] = ("ant", "bee", "cat")) -> Path:
    """A folder CLASS/NUMBER.jpg of pictures of several sizes."""
    sizes = [(72, 96), (96, 72), (80, 80), (70, 110)]
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            seed = label * 1000 + number
            (root / name / f"{number:03}.jpg").write_bytes(jpeg_bytes(picture(seed, *sizes[seed % 4])))
    return root


def tar_file(path: Path, members: Mapping[str, bytes], form: int = tarfile.GNU_FORMAT) -> Path:
    """A tar file of these members in this order."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def npy_bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def raw_pictures(count: int, side: int = 12) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pictures `(N, side, side, 3)` that are stored raw, and labels that number them."""
    return np.stack([picture(seed, side, side) for seed in range(count)]), np.arange(count)


def raw_beton(path: Path, count: int, side: int = 12) -> Path:
    """A `.beton` of them; the label of each sample is its number."""
    convert(raw_pictures(count, side), path, progress=False)
    return path


def jpeg_beton(path: Path, per_class: int = 6) -> Path:
    """A `.beton` of JPEG files of several sizes, in three classes."""
    convert(jpeg_folder(path.parent / f"{path.stem}-images", per_class), path, progress=False)
    return path


def beton_of(source: Any, path: Path, **options: Any) -> Beton:
    """Convert a source, and open the file."""
    convert(source, path, **options)
    return open_beton(path)


def refused(source: Any, folder: Path, words: str, **options: Any) -> str:
    """Require that `convert` rejects a source with these words, and leaves no file, finished or not; the message."""
    out = folder / "refused"
    out.mkdir(exist_ok=True)
    with pytest.raises(DataError, match=words) as caught:
        convert(source, out / "out.beton", **options)
    assert list(out.iterdir()) == []
    return str(caught.value)


def run_python(
    code: str, *arguments: Any, timeout: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter, in the tests' folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = sys.executable, "-c", code, *map(str, arguments)
    return process_state.run(*command, timeout=timeout, cwd=SUPPORT, env=environment)


def run_script(name: str, *arguments: Any, **environment: str) -> str:
    """Run a script of this folder in a fresh interpreter, which must succeed; return its output."""
    command = sys.executable, SUPPORT / name, *map(str, arguments)
    return process_state.output_of(*command, timeout=300, env=os.environ | environment)


def make(kind: Any, source: Any, **options: Any) -> Any:
    """A loader of this kind, of small batches, that starts no process."""
    given = {"batch_size": 4, "image_size": 24, "workers": 0 if kind is TorchLoader else 2}
    return kind(source, **given | options)


def load(kind: Any, path: Path, **options: Any) -> torch.Tensor:
    """All images of an epoch by a loader of this kind, in the file's order, uint8, 24 pixels wide."""
    with make(kind, path, **{"order": "sequential", "dtype": torch.uint8, **options}) as loader:
        return torch.cat([images for images, _ in loader])


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether the batches of two lists are equal, bit for bit."""
    return len(one) == len(other) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(one, other, strict=True)
    )
