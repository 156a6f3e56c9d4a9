"""Convert, load and train with the Drivetrain that is installed where this runs, in a folder, and print what was used.

    python wheel_program.py FOLDER

It imports nothing of the tests: `.ci/wheels` and tests/house/test_packaging.py run it in other environments.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from drivetrain import Pipeline
from drivetrain.loaders import FFCVLoader
from PIL import Image
from torch import nn

CLASSES, IMAGES, SIDE = 2, 16, 32


def photographs(folder: Path) -> None:
    """Write JPEGs of noise, whose brightness is their class."""
    noise = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / f"class {label}").mkdir(parents=True)
        for number in range(IMAGES):
            pixels = noise.integers(0, 100, (48, 64, 3), dtype=np.uint8) + np.uint8(100 * label)
            Image.fromarray(pixels).save(folder / f"class {label}" / f"{number}.jpg", quality=90)


def model(classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, classes))


def main(folder: Path) -> None:
    photographs(folder / "photographs")
    file = folder / "train.beton"
    command = Path(sys.executable).parent / "drivetrain"
    subprocess.run([command, "convert", folder / "photographs", file, "--quiet"], check=True)
    images, labels = next(iter(FFCVLoader(file, batch_size=8, image_size=SIDE, workers=1)))
    loading = Pipeline(model).load(str(file), str(file), batch_size=8, image_size=SIDE, workers=1)
    result = loading.optimize("sgd", lr=0.1).fit(epochs=1)
    import drivetrain

    found = {
        "drivetrain": drivetrain.__file__,
        "batch": [list(images.shape), list(labels.shape)],
        "epochs": len(result.history.epochs),
        "accuracy": result.accuracy,
        "libraries": sorted(set(re.findall(r"/.*(?:jpeg|drivetrain|opencv|ffcv).*\.so.*", _maps()))),
        "modules": sorted({name.split(".")[0] for name in sys.modules} & {"cv2", "ffcv", "numba"}),
    }
    print(json.dumps(found))


def _maps() -> str:
    """Return the list of files mapped into this process; empty where the system has none."""
    maps = Path("/proc/self/maps")
    return maps.read_text() if maps.exists() else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
