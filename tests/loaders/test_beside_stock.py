"""`FFCVLoader` in one process with a stock FFCV loader, which changes types that numba shares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from loader_pictures import jpeg_beton

PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from drivetrain.loaders import FFCVLoader

def stock(path):
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
    from ffcv.loader import Loader
    decoders = {"image": [CenterCropRGBImageDecoder((32, 32), ratio=1.0)], "label": [IntDecoder()]}
    return sum(len(labels) for _, labels in Loader(path, 3, num_workers=2, pipelines=decoders))

def ours(path):
    options = {"batch_size": 3, "image_size": 32, "workers": 2, "policy": {"name": "aug_mix"}}
    with FFCVLoader(path, crop=sys.argv[2], **options) as loader:
        return torch.cat([images for images, _ in loader])

path, first = sys.argv[1], sys.argv[3]
before = ours(path) if first == "ours" else None
assert stock(path) == 18
after = [ours(path) for _ in range(2)]
assert torch.equal(*after)
assert before is None or torch.equal(before, after[0])
print(stock(path), len(after[0]))
"""


@pytest.mark.process
@pytest.mark.parametrize("first", ["ours", "stock"])
@pytest.mark.slow
def test_both_loaders_in_one_process(tmp_path: Path, first: str) -> None:
    path = jpeg_beton(tmp_path / "photos.beton")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, "resized", first],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["18", "18"]
