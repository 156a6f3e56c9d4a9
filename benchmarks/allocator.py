"""Measure the effect of glibc keeping a step's memory for the next step on a CPU, as `drivetrain doctor` recommends.

    python benchmarks/allocator.py [--rounds 5] [--recipe cifar10-quickstart]

Each contender is a separate process that trains one epoch of the recipe, with the environment variables or without.
They are interleaved, every second round in reverse order. The losses must be the same: memory does not change results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from drivetrain.common.machine import KEEPS_MEMORY
from measuring import compare, measure, save

KEPT, PLAIN = "memory kept", "glibc's default"


def images_per_s(recipe: str, variables: dict[str, str], losses: set[float]) -> float:
    """Return the throughput of one epoch in a process with only these variables set, and add its loss to `losses`."""
    environment = {name: value for name, value in os.environ.items() if name not in KEEPS_MEMORY}
    command = [sys.executable, "-m", "drivetrain", "train", recipe, "epochs=1", "val=null", "--out"]
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([*command, out], env=environment | variables, check=True, capture_output=True)
        (epoch,) = json.loads((Path(out) / "history.json").read_text())["epochs"]
    losses.add(epoch["loss"])
    return float(epoch["images_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="cifar10-quickstart")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    losses: set[float] = set()
    contenders = {
        name: partial(images_per_s, options.recipe, variables, losses)
        for name, variables in ((KEPT, KEEPS_MEMORY), (PLAIN, {}))
    }
    figures = measure(contenders, options.rounds)
    if len(losses) != 1:
        raise SystemExit(f"The losses differ: {sorted(losses)}.")
    table, rows = compare(f"training {options.recipe}", "images/s", figures, KEPT)
    results = {"recipe": options.recipe, "variables": KEEPS_MEMORY, "contenders": rows}
    save([table], results, options.out / "allocator.json")


if __name__ == "__main__":
    main()
