"""Convert, load and train with the Drivetrain that is installed where this runs, in a folder, and print what was used.

    python wheel_program.py FOLDER [quickstart]

With `quickstart`, also train on two ranks, and run the commands of the quickstart on a few images. It imports nothing
of the tests: `.ci/release.py` and tests/house/test_packaging.py run it in other environments.
"""

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
COMMAND = Path(sys.executable).parent / "drivetrain"


def photographs(folder: Path, height: int = 48, width: int = 64, classes: int = CLASSES) -> None:
    """Write JPEGs of noise, whose brightness is their class."""
    noise = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class {label}").mkdir(parents=True)
        darkest = np.uint8(label * 150 // classes)
        for number in range(IMAGES):
            pixels = noise.integers(0, 100, (height, width, 3), dtype=np.uint8) + darkest
            Image.fromarray(pixels).save(folder / f"class {label}" / f"{number}.jpg", quality=90)


def model(classes: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, classes))


def drivetrain(*arguments: str | Path) -> str:
    """Run a command of Drivetrain, and return what it prints; end with its error if it fails."""
    done = subprocess.run([COMMAND, *arguments], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"drivetrain {' '.join(map(str, arguments))} failed (exit {done.returncode}).")
    return done.stdout.strip()


def losses(training: Pipeline) -> list[float]:
    """Return the validation losses of one device and of two ranks, whose gradients torch averages."""
    runs = training, training.distribute("fsdp", devices=2)
    return [run.fit(epochs=1).history.epochs[-1].val_loss or 0.0 for run in runs]


def quickstart(folder: Path) -> dict[str, object]:
    """Run what `make quickstart` does, on images of CIFAR-10's size, then predict with the model that it saves."""
    photographs(folder / "small", SIDE, SIDE, classes=10)
    file, out = folder / "small.beton", folder / "out"
    drivetrain("convert", folder / "small", file, "--quiet")
    drivetrain(
        "train", "cifar10-quickstart", f"train={file}", f"val={file}", "batch_size=16", "epochs=1", "precision=fp32",
        "--out", out, "--ledger", "--ledger-seconds", "45",
    )  # fmt: skip
    return {
        "version": drivetrain("--version"),
        "files": sorted(path.name for path in out.iterdir()),
        "prediction": re.findall(r"[\d.]+%", drivetrain("predict", out, next(folder.glob("small/*/0.jpg")))),
    }


def main(folder: Path, *extras: str) -> None:
    photographs(folder / "photographs")
    file = folder / "train.beton"
    drivetrain("convert", folder / "photographs", file, "--quiet")
    images, labels = next(iter(FFCVLoader(file, batch_size=8, image_size=SIDE, workers=1)))
    loading = Pipeline(model).load(str(file), str(file), batch_size=8, image_size=SIDE, workers=1)
    result = loading.optimize("sgd", lr=0.1).fit(epochs=1)
    import drivetrain as package

    found = {
        "drivetrain": package.__file__,
        "batch": [list(images.shape), list(labels.shape)],
        "epochs": len(result.history.epochs),
        "accuracy": result.accuracy,
        "libraries": sorted(set(re.findall(r"/.*(?:jpeg|drivetrain|opencv|ffcv)[^/\n]*\.so.*", _maps()))),
        "modules": sorted({name.split(".")[0] for name in sys.modules} & {"cv2", "ffcv", "numba"}),
    }
    if "quickstart" in extras:
        found |= {"losses": losses(loading.optimize("sgd", lr=0.001)), **quickstart(folder)}
    print(json.dumps(found))


def _maps() -> str:
    """Return the list of files mapped into this process; empty where the system has none."""
    maps = Path("/proc/self/maps")
    return maps.read_text() if maps.exists() else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
