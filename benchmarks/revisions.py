"""Compare the speed of two revisions of Drivetrain, side by side in one run: loading, training, start-up.

    python benchmarks/revisions.py PHOTOS [--base REVISION] [--rounds 15] [--out FOLDER]

For code that was rebuilt and should be as fast as before. Each revision is built in a folder of its own, and runs in a
process of its own for all rounds; what it measures uses only what users call:

- loading: photographs at 224 pixels, and raw images of 32 pixels, by `FFCVLoader`, images/s of an epoch;
- the loop: `train_epoch` with a tiny network on batches in memory, steps/s; and `Pipeline.fit`, images/s of an epoch;
- start-up: `import drivetrain.Pipeline`, `drivetrain --help` and `drivetrain recipes`, seconds.

The contenders take turns within each round; ratios are taken round by round (`measuring.measure`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = {
    "photographs, 224 pixels": "images/s",
    "raw images, 32 pixels": "images/s",
    "train_epoch, tiny network": "steps/s",
    "fit, an epoch": "images/s",
}
COMMANDS = {
    "import Pipeline": ["-c", "from drivetrain import Pipeline"],
    "drivetrain --help": ["-m", "drivetrain", "--help"],
    "drivetrain recipes": ["-m", "drivetrain", "recipes"],
}


def serve(photos: str) -> None:
    """Run the workloads that are named on standard input, and print the result of each: a process of one revision."""
    import numpy as np
    import torch
    from drivetrain import Pipeline, strategies
    from drivetrain.loaders import FFCVLoader, convert
    from drivetrain.pipeline import train_epoch
    from torch import nn

    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    draws = np.random.default_rng(0)
    small, big = folder / "small.beton", folder / "big.beton"
    convert((draws.integers(0, 256, (4096, 32, 32, 3), np.uint8), np.arange(4096) % 10), small, progress=False)
    convert(photos, big, max_resolution=400, progress=False)
    loaders = {
        "photographs, 224 pixels": FFCVLoader(big, batch_size=64, image_size=224, workers=2),
        "raw images, 32 pixels": FFCVLoader(small, batch_size=256, image_size=32, workers=2),
    }
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    engine = strategies.get("single", device="cpu").prepare(
        network, lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    )
    batches = [(torch.randn(4, 3, 16, 16), torch.randint(10, (4,)))] * 300
    pipeline = (
        Pipeline("cifar_resnet", num_classes=10, width=4)
        .load(str(small), batch_size=256, image_size=32, workers=2)
        .optimize("sgd", lr=0.01)
        .distribute("single", device="cpu")
    )

    def run(name: str) -> float:
        start = perf_counter()
        if name in loaders:
            count = sum(len(images) for images, _ in loaders[name])
        elif name == "fit, an epoch":
            return float(pipeline.fit(epochs=1, progress=False).history.epochs[0].images_per_s)
        else:
            train_epoch(engine, batches, nn.functional.cross_entropy)
            count = len(batches)
        return count / (perf_counter() - start)

    print("ready", flush=True)
    for line in sys.stdin:
        print(run(line.strip()), flush=True)


class Revision:
    """A process that runs the workloads with the package of a folder."""

    def __init__(self, package: Path, photos: Path, scratch: Path) -> None:
        self.environment = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONWARNINGS": "ignore"}
        self.scratch = scratch
        scratch.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(photos), "--serve"], cwd=scratch, env=self.environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self._answers, self._requests = self.process.stdout, self.process.stdin
        self._answer()

    def _answer(self) -> str:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"A revision's process ended with status {self.process.wait()}; see above.")
        return line

    def workload(self, name: str) -> float:
        """Run a workload once; return its rate."""
        self._requests.write(f"{name}\n")
        self._requests.flush()
        return float(self._answer())

    def command(self, name: str) -> float:
        """Run a command once in a new interpreter; return its seconds."""
        start = perf_counter()
        subprocess.run(
            [sys.executable, *COMMANDS[name]], cwd=self.scratch, env=self.environment, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return perf_counter() - start

    def close(self) -> None:
        """End the process."""
        self._requests.close()
        self.process.wait()


def checkout(revision: str, folder: Path) -> Path:
    """Return that revision as a package named drivetrain in `folder`, with its native library."""
    package = folder / "drivetrain"
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    package.mkdir(parents=True)
    subprocess.run(["tar", "x"], cwd=package, input=archive, check=True)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=package, check=True)
    # As installed: with PYTHONDONTWRITEBYTECODE, each start would compile the sources again.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "."], cwd=package, check=True)
    return package


def main() -> None:
    """Measure, print the tables, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("photos", type=Path, help="a folder of photographs with one folder per class")
    parser.add_argument("--base", default="1385f5d", help="the revision to compare with (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(str(options.photos))
        return
    from measuring import compare, measure, save

    tables, results = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos = options.photos.resolve()
        packages = {
            options.base: checkout(options.base, folder / "base"),
            "this revision": checkout("HEAD", folder / "now"),
        }
        revisions = {name: Revision(package, photos, package.parent / "scratch") for name, package in packages.items()}
        for what, unit in {**WORKLOADS, **dict.fromkeys(COMMANDS, "s")}.items():
            run = Revision.command if what in COMMANDS else Revision.workload
            figures = measure(
                {name: partial(run, one, what) for name, one in revisions.items()},
                options.rounds,
            )
            table, results[what] = compare(what, unit, figures, "this revision")
            tables.append(table)
        for revision in revisions.values():
            revision.close()
    save(tables, results, options.out / "revisions.json")


if __name__ == "__main__":
    main()
