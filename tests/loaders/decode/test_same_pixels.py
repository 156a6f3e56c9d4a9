"""What the loader makes of a few pictures is what it has made of them before, bit for bit.

`pixels.json` has the digests of the version before the native core, which numba compiled (2026-11-22);
of evaluation since it is Pillow's in every bit, and its crops are rounded down (2026-11-23).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drivetrain.loaders import FFCVLoader, convert
from loader_pictures import image_folder, jpeg_bytes, picture

KNOWN = json.loads(Path(__file__).with_name("pixels.json").read_text())
JITTER = {"color_jitter": (0.4, 0.4, 0.4), "cutout": 12}
CASES: dict[str, dict[str, Any]] = {
    "crop": {"image_size": 64},
    "small crop": {"image_size": 64, "scale": (0.08, 1)},
    "tiny": {"image_size": 9, "scale": (0.08, 1)},
    "enlarged": {"image_size": 200, "scale": (0.08, 0.2)},
    "evaluation": {"image_size": 64, "train": False},
    "area": {"image_size": 64, "interpolation": "area"},
    "area, evaluation": {"image_size": 50, "interpolation": "area", "train": False},
    "area, enlarged": {"image_size": 200, "interpolation": "area"},
    "colors": {"image_size": 64, **JITTER},
    "bfloat16": {"image_size": 64, "dtype": torch.bfloat16, **JITTER},
    "bytes": {"image_size": 64, "dtype": torch.uint8, **JITTER},
    **{name: {"image_size": 65, "policy": {"name": name}} for name in ("rand_augment", "trivial_augment", "aug_mix")},
}  # fmt: skip


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 JPEGs of four codings, and 8 raw pictures of 48 pixels."""
    folder = tmp_path_factory.mktemp("same")
    ways = ({"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"progressive": True})
    files: dict[str, Any] = {f"{n}.png": picture(n, 48, 48) for n in range(24, 32)}
    for n in range(24):
        files[f"{n:02}.jpg"] = jpeg_bytes(picture(n, 90 + 7 * n, 160 - 3 * n), **ways[n % 4])
    convert(image_folder(folder / "images", files), folder / "mixed.beton")
    return folder / "mixed.beton"


def loaded(path: Path, options: dict[str, Any]) -> str:
    with FFCVLoader(path, batch_size=8, workers=2, order="sequential", seed=3, **options) as loader:
        images = torch.cat([batch[0].permute(0, 2, 3, 1) for batch in loader])
    return digest(images.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_the_version_before(case: str, mixed: Path) -> None:
    pictures = sorted((mixed.parent / "images" / "a").iterdir())
    if digest(b"".join(path.read_bytes() for path in pictures[:24])) != KNOWN["pictures"]:
        pytest.skip("Pillow encodes JPEGs differently here")
    assert loaded(mixed, CASES[case]) == KNOWN[case]
