"""Measure which share of the machine's peak a recipe's training step reaches, and where the rest goes.

    python benchmarks/limits.py RECIPE [KEY=VALUE ...] [--rounds 9] [--batches 10] [--out benchmarks/results]

The peak is that of a large matrix product, by torch, in the precision of the recipe, on as many threads. The floating
point operations of an image are counted by torch (`FlopCounterMode`: matrix products and convolutions, forward and
backward); those of an optimizer that multiplies matrices, such as Muon, are in its time, not in the count. Each round
has the matrix product, the model alone on a batch in memory, the loader alone, full training, and full training timed
by part, in turns, every second round in reverse order. The processor time of the loader alone shows which share of the
cores it takes from training.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
from drivetrain import Pipeline
from drivetrain.common import machine
from drivetrain.common.table import Table
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.ledger.variant import PARTS, Trial, Workload
from drivetrain.pipeline.measuring.runner import Loaders, build_variant
from drivetrain.pipeline.measuring.trials import BuiltVariant, run_trial
from drivetrain.pipeline.measuring.variants import in_turn
from drivetrain.pipeline.recipes.presets import parse_overrides
from drivetrain.pipeline.training.build import fork_rng, plain_torch, resolve_data
from drivetrain.strategies.devices import wait_for
from measuring import measure, save, summarize
from torch.utils.flop_counter import FlopCounterMode

SIDE, PRODUCTS = 2048, 8
ON_GPU = 4  # times the side: a GPU computes smaller products in less time than it takes to begin them
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORKLOADS: dict[str, Workload] = {
    "full training": "train", "timed by part": "split", "model alone": "model", "loader alone": "loader",
}  # fmt: skip


def peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of a product of two large matrices, on a GPU after as many others: at first
    it chooses a kernel, and raises its clock."""
    side = SIDE * (ON_GPU if device.type == "cuda" else 1)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    for _ in range(PRODUCTS * (device.type == "cuda")):
        result = left @ right
    wait_for(device)
    start = perf_counter()
    for _ in range(PRODUCTS):
        result = left @ right
    result[0, 0].item()  # waits for a GPU
    return 2 * side**3 * PRODUCTS / (perf_counter() - start)


def operations(variant: BuiltVariant, batches: int) -> float:
    """Return the operations of an image, forward and backward, averaged over the sizes of a schedule."""
    with FlopCounterMode(display=False) as counter:
        trial, _ = run_trial(variant, "model", 0, batches)
    # A trial has each phase once, whatever its share of the run; the count is exact for a single phase.
    return float(counter.get_total_flops() / trial.images / len(variant.phases))


def processor_seconds() -> float:
    """Return those of this process and its children: the workers of torch's DataLoader live on after a trial."""
    children = [one.cpu_times() for one in psutil.Process().children(recursive=True)]
    return sum(os.times()[:4]) + float(sum(one.user + one.system for one in children))


class Bench:
    def __init__(self, variant: BuiltVariant, batches: int) -> None:
        self._variant, self._batches, self._epoch = variant, batches, 0
        self.parts: list[dict[str, float]] = []
        self.cpu: list[float] = []  # processor seconds of an image, of the loader alone

    def __call__(self, workload: Workload) -> float:
        self._epoch += 1
        before = processor_seconds()
        trial, _ = run_trial(self._variant, workload, self._epoch, self._batches)
        if workload == "split":
            self.parts.append(shares(trial))
        if workload == "loader":
            self.cpu.append((processor_seconds() - before) / trial.images)
        return trial.speed


def shares(trial: Trial) -> dict[str, float]:
    parts = {name: (trial.parts or {})[name] / trial.seconds for name in PARTS}
    return {**parts, "waiting for data": trial.waited / trial.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    pipeline = Pipeline.from_recipe(options.recipe, **parse_overrides(options.overrides))
    plan = resolve_data(resolve(pipeline), True)
    with plain_torch(), fork_rng(plan.seed), ExitStack() as stack:
        whole = in_turn(plan)[-1]
        variant, _ = build_variant(whole.plan, Loaders(stack), stack, options.batches)
        device = variant.built.engine.device
        precision = whole.plan.distribution.precision
        bench, count = Bench(variant, options.batches), operations(variant, options.batches)
        contenders = {name: lambda kind=kind: bench(kind) for name, kind in WORKLOADS.items()}
        product = f"matrix product, {precision}"
        figures = measure({product: lambda: peak(DTYPES[precision], device), **contenders}, options.rounds)
    results = report(figures, product, count, bench)
    tables = results.pop("tables")
    facts = {"recipe": options.recipe, "overrides": options.overrides, "precision": precision}
    name = Path(options.recipe).stem
    save(tables, {**facts, **results}, options.out / f"limits-{name}.json")


def report(figures: dict[str, list[float]], product: str, count: float, bench: Bench) -> dict[str, Any]:
    rates = figures.pop(product)
    rows = {
        name: {
            "images/s": summarize(speeds),
            **({} if name == "loader alone" else {
                "share of the peak": summarize([a * count / b for a, b in zip(speeds, rates, strict=True)]),
            }),
        }
        for name, speeds in figures.items()
    }  # fmt: skip
    cpu = [
        seconds * speed / machine.cores()
        for seconds, speed in zip(bench.cpu[1:], figures["full training"], strict=True)
    ]
    over = [a / b for a, b in zip(figures["full training"], figures["model alone"], strict=True)]
    parts = {name: summarize([one[name] for one in bench.parts[1:]]) for name in bench.parts[0]}
    others = {
        "full training over model alone": summarize(over), "share of the cores that the loader takes": summarize(cpu),
    }  # fmt: skip
    first = Table(
        ("", "images/s", "quartiles", "share of the peak"),
        [
            (name, f"{row['images/s']['median']:,.0f}",
             f"{row['images/s']['low']:,.0f} to {row['images/s']['high']:,.0f}",
             f"{row['share of the peak']['median']:.0%}" if "share of the peak" in row else "")
            for name, row in rows.items()
        ],
        caption=f"{product}: {summarize(rates)['median'] / 1e9:,.0f} GFLOP/s; an image: {count / 1e9:.3f} GFLOP",
    )  # fmt: skip
    second = Table(
        ("of a step", "median", "quartiles"),
        [
            (name, f"{one['median']:.1%}", f"{one['low']:.1%} to {one['high']:.1%}")
            for name, one in {**parts, **others}.items()
        ],
    )
    return {
        "tables": [first, second],
        "operations_per_image": count,
        "peak_operations_per_s": summarize(rates),
        "rates": rows,
        "parts_of_a_step": parts,
        **{name.replace(" ", "_"): value for name, value in others.items()},
    }


if __name__ == "__main__":
    main()
