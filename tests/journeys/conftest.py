"""A user's folder for each journey: photographs by class and scenes with masks, and the files that jobs train on.

The 16 jobs are those for which a user of timm or Lightning would come. Each test is written from the documentation
alone, and checks what that user would look at. Pictures are a small part of real data where there is some: of the
folder `$DRIVETRAIN_JOURNEYS`, by default `../shared/data`, which has `imagenette/` (folders by class) and `camvid/`
(images and masks, of which label 11 is void). Otherwise they are drawn.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from drivetrain.loaders import convert
from loader_pictures import jpeg_bytes, jpeg_folder, picture
from PIL import Image
from places import ROOT, SUPPORT

REAL = Path(os.environ.get("DRIVETRAIN_JOURNEYS", ROOT.parent / "shared/data"))
PARTS = {"train": 8, "val": 4}
"""Images of each class, and a third of the scenes."""
VOID = 11


def photographs(folder: Path) -> None:
    for part, count in PARTS.items():
        real = REAL / "imagenette" / part
        if not real.is_dir():
            jpeg_folder(folder / part, count)
            continue
        for of_class in sorted(real.iterdir())[:3]:
            (folder / part / of_class.name).mkdir(parents=True)
            for path in sorted(of_class.iterdir())[:count]:
                shutil.copyfile(path, folder / part / of_class.name / f"{path.stem}.jpg")


def scenes(folder: Path) -> None:
    for part, count in PARTS.items():
        for kind in ("images", "masks"):
            (folder / part / kind).mkdir(parents=True)
        real = REAL / "camvid" / part
        if real.is_dir():
            for path in sorted((real / "images").iterdir())[: 3 * count]:
                shutil.copyfile(path, folder / part / "images" / path.name)
                shutil.copyfile(real / f"masks/{path.stem}.png", folder / part / f"masks/{path.stem}.png")
            continue
        for seed in range(3 * count):
            image = picture(seed, 90, 120)
            mask = (np.mgrid[0:90, 0:120] // 30).sum(0) % (VOID + 1)  # stripes of the first classes
            mask[:10] = VOID
            (folder / part / f"images/{seed}.jpg").write_bytes(jpeg_bytes(image))
            Image.fromarray(mask.astype(np.uint8)).save(folder / part / f"masks/{seed}.png")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `photos` and `camvid`, and the photographs as `train.beton` and `val.beton`, written once."""
    folder = tmp_path_factory.mktemp("data")
    photographs(folder / "photos")
    scenes(folder / "camvid")
    for part in PARTS:
        convert(folder / "photos" / part, folder / f"{part}.beton", max_resolution=160, progress=False)
    return folder


RECIPE = """\
model: cifar_resnet
model_options: {num_classes: 3, width: 8}
train: train.beton
val: val.beton
batch_size: 8
image_size: 32
optimizer: {name: adamw, lr: 0.003}
epochs: 2
"""


@pytest.fixture(autouse=True)
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: links to the data, `mine.yaml`, and `net.py` with a model of the user's own."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    shutil.copyfile(SUPPORT / "journey_models.py", tmp_path / "net.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
