"""Measure the step time of our loop against a hand-written PyTorch loop, Lightning's Trainer and Composer's Trainer.

    python benchmarks/loop.py [--rounds 31] [--steps 200] [--batch 8] [--width 4] [--only "by hand" Drivetrain …]

All train the same model, from the same weights, on the same batches in memory, with SGD at a constant learning rate, in
fp32 on one device: a GPU if there is one. The extras of every Trainer are off, except for "Drivetrain, all extras",
which is `fit` itself with progress bar, CSV log and schedule. "Drivetrain" includes the guard against non-finite
losses, which `fit` always has; "no guard" shows its cost.

A trial is one epoch of `--steps` steps. Contenders are interleaved, every second round in reverse order, and ratios are
taken round by round. Times run from the first batch of a trial to the end of the last step, so that starting a Trainer
does not count. Model and batches are small on purpose, with a step of 5 ms on one core: a short step shows best what a
loop adds.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from drivetrain.common.table import Table
from drivetrain.pipeline.ledger.statistics import Ratio, ratio
from drivetrain.pipeline.models import cifar_resnet
from drivetrain.pipeline.telemetry.provenance import version
from loop_contenders import DEVICE, HAND, MAKERS, OTHERS, SIDE, UNGUARDED, Batches
from measuring import Contender, measure, save, summarize


def contenders(names: list[str], batch: int, steps: int, width: int) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders that work here, and why the others do not."""
    torch.manual_seed(0)
    model = cifar_resnet(width=width)
    made: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    images = [torch.randn(batch, 3, SIDE, SIDE, device=DEVICE) for _ in range(min(steps, 16))]
    labels = [torch.randint(10, (batch,), device=DEVICE) for _ in images]
    pairs = list(zip(images, labels, strict=True))
    for name in names:
        batches = Batches([pairs[number % len(pairs)] for number in range(steps)])
        try:
            made[name] = MAKERS[name](copy.deepcopy(model), batches)
            made[name]()
        except Exception as error:  # anything that another library's Trainer raises with this torch
            if name not in OTHERS:
                raise
            made.pop(name, None)
            missing[name] = f"{type(error).__name__}: {error}"
            print(f"{name} is left out: {missing[name]:.300}")
    return made, missing


def results(figures: dict[str, list[float]], steps: int) -> tuple[Table, dict[str, Any]]:
    """Return table and JSON of milliseconds per step, and the ratios to the hand-written loop and to our bare loop."""
    rows: dict[str, Any] = {}
    cells = []
    for name, seconds in figures.items():
        own = summarize([1000 * value / steps for value in seconds])
        over = {
            base: ratio([a / b for a, b in zip(seconds, figures[base], strict=True)])
            for base in (HAND, UNGUARDED)
            if base in figures
        }
        rows[name] = {"ms_per_step": own, "time_over": {base: asdict(one) for base, one in over.items()}}
        cells.append((
            name, f"{own['median']:.3f}  ({own['low']:.3f} to {own['high']:.3f})",
            *(shown(over.get(base)) for base in (HAND, UNGUARDED)),
        ))  # fmt: skip
    heads = ("", "ms per step (median, quartiles)", f"time over {HAND}", f"time over {UNGUARDED}")
    return Table(heads, cells, caption="ratios within rounds: trimmed mean and 95 % interval"), rows


def shown(one: Ratio | None) -> str:
    """Format to a tenth of a percent, the size of the differences."""
    return "" if one is None else f"{one.value:.3f}  ({one.low:.3f} to {one.high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # from the other Trainers
    made, missing = contenders(options.only, options.batch, options.steps, options.width)
    table, rows = results(measure(made, options.rounds), options.steps)
    settings = {name: getattr(options, name) for name in ("rounds", "steps", "batch", "width")}
    foreign = {name: version(name) for name in ("lightning", "mosaicml")}
    save(
        [table],
        {"contenders": rows, "left_out": missing, "versions": foreign, "device": DEVICE, **settings},
        options.out / "loop.json",
    )


if __name__ == "__main__":
    main()
