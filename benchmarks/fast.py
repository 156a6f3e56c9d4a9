"""Measure the time to 94 % on CIFAR-10 for one seed: the recipe cifar10-fast against a plain PyTorch loop.

    python benchmarks/fast.py [--seed 0] [--target 0.94] [--small FOLDER] [--out benchmarks/results]

Both train in this process, one after the other; an even seed starts with Drivetrain, an odd one with the plain loop.
One epoch of each runs first as warm-up: it initializes the device, selects the convolution algorithms and converts the
images. Times are of training only, without evaluation. The plain loop keeps all images on the device and augments them
there, as airbench does; Drivetrain's loader augments on the CPU, and copies each batch to the device.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from drivetrain import Pipeline
from drivetrain.loaders import FFCVLoader
from drivetrain.loaders.datasets.cifar10 import fetch_cifar10, load_cifar10
from drivetrain.pipeline.telemetry.provenance import provenance
from fast_plain import BATCH, SMALL, Images, seconds_to, train

OURS, PLAIN = "Drivetrain", "plain PyTorch"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Run = list[dict[str, float]]


def ours(seed: int, epochs: int, overrides: dict[str, Any], images: int) -> Run:
    """Train the recipe; return training seconds, accuracy and loss of each epoch, which has `images` images."""
    result = Pipeline.from_recipe("cifar10-fast", seed=seed, **overrides).fit(epochs=epochs, progress=False)
    return [
        {"seconds": images / one.images_per_s, "accuracy": one.accuracy or 0.0, "loss": one.loss}
        for one in result.history.epochs
    ]


def split_of(path: Path) -> tuple[Any, Any]:
    """Return the images of a small `.beton` file, uint8 (N, 32, 32, 3), and its labels."""
    options: dict[str, Any] = {"batch_size": 64, "image_size": 32, "train": False, "eval_ratio": 1.0}
    with FFCVLoader(path, dtype=torch.uint8, **options) as loader:
        pairs = list(loader)
    images = torch.cat([images for images, _ in pairs]).permute(0, 2, 3, 1).contiguous()
    return images.numpy(), torch.cat([labels for _, labels in pairs]).numpy()


def summary(epochs: Run, target: float) -> dict[str, Any]:
    """Return all epochs, the training time, the last accuracy, and the time to the target."""
    return {
        "epochs": epochs, "training_s": sum(epoch["seconds"] for epoch in epochs),
        "accuracy": epochs[-1]["accuracy"], "seconds_to_target": seconds_to(target, epochs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.94)
    parser.add_argument("--small", type=Path, help="train.beton and val.beton for a rehearsal of one epoch")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    epochs, batch, overrides = 11, BATCH, dict[str, Any]()
    if options.small is None:
        folder = fetch_cifar10()
        splits = [load_cifar10(folder, "train"), load_cifar10(folder, "test")]
    else:
        files = [options.small / "train.beton", options.small / "val.beton"]
        splits = [split_of(file) for file in files]
        epochs, batch = 1, 64
        overrides = {"train": str(files[0]), "val": str(files[1]), "batch_size": batch}
        overrides |= {"precision": "fp32", "model_options.widths": list(SMALL)}
    data, val = (Images(*split, DEVICE) for split in splits)
    count = len(data.images) // batch * batch
    contenders: dict[str, Any] = {
        OURS: lambda seed, epochs: ours(seed, epochs, overrides, count),
        PLAIN: lambda seed, epochs: train(seed, epochs, batch, data, val, bool(overrides)),
    }
    for contender in contenders.values():
        contender(options.seed + 1000, 1)
    runs = {name: contenders[name](options.seed, epochs) for name in list(contenders)[:: -1 if options.seed % 2 else 1]}
    rows = {name: summary(runs[name], options.target) for name in contenders}
    for name, row in rows.items():
        reached = f"{options.target:.0%} at {row['seconds_to_target']} s"
        print(f"{name}: {row['accuracy']:.2%} after {row['training_s']:.2f} s; {reached}")
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"seed": options.seed, "target": options.target, "contenders": rows, "provenance": provenance()}
    (options.out / "fast.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
