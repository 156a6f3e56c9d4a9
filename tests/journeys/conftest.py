"""A user's folder for each journey: photographs by class, scenes with masks, and the files that jobs train on.

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
from loader_pictures import jpeg_folder
from PIL import Image
from pipeline_data import surroundings
from places import ROOT, SUPPORT
from segmentation_jobs import scene

VOID = 11
REAL = Path(os.environ.get("DRIVETRAIN_JOURNEYS", ROOT.parent / "shared/data"))
PARTS = {"train": 8, "val": 4}
"""Images of each of three classes, and a third of the scenes."""


def photographs(folder: Path, real: Path, count: int) -> None:
    if not real.is_dir():
        jpeg_folder(folder, count)
        return
    for of_class in sorted(real.iterdir())[:3]:
        (folder / of_class.name).mkdir(parents=True)
        for path in sorted(of_class.iterdir())[:count]:
            shutil.copyfile(path, folder / of_class.name / f"{path.stem}.jpg")


def scenes(folder: Path, real: Path, count: int) -> None:
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
        for path in sorted((real / kind).glob("*.*"))[: 3 * count]:
            shutil.copyfile(path, folder / kind / path.name)
    for seed in range(0 if real.is_dir() else 3 * count):
        image, mask = scene(seed)
        Image.fromarray(image).save(folder / f"images/{seed}.jpg")
        Image.fromarray(np.where(mask == 255, VOID, mask)).save(folder / f"masks/{seed}.png")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `photos` and `camvid`, and the photographs as `train.beton` and `val.beton`, written once."""
    folder = tmp_path_factory.mktemp("data")
    for part, count in PARTS.items():
        photographs(folder / "photos" / part, REAL / "imagenette" / part, count)
        scenes(folder / "camvid" / part, REAL / "camvid" / part, count)
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
    """The working directory: links to the data, `mine.yaml`, and `net.py` with a model of the user's own. Nothing
    global stays changed but random states, since journeys draw weights."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    shutil.copyfile(SUPPORT / "journey_models.py", tmp_path / "net.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules, state, path = set(sys.modules), surroundings()[3:], list(sys.path)
    yield tmp_path
    for name in set(sys.modules) - modules:  # of this folder: another journey has others by the same names
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    assert (surroundings()[3:], sys.path) == (state, path)
