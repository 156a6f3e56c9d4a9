"""Measure how long a checkpoint of a sharded model blocks training, against torch's distributed checkpoints.

    python benchmarks/checkpoints.py [--millions 50] [--rounds 9] [--steps 2] [--only seconds memory]
        [--out benchmarks/results]

Two ranks with FSDP2 and AdamW on the CPU, through gloo, one thread each. In each round, the same state is saved by
Drivetrain, as `fit` does (`capture_state`, `all_finite` and `CheckpointWriter.save`: each rank's rows, with digests),
and by `torch.distributed.checkpoint.async_save` (DCP), in turns. Measured on each rank, of which the slowest counts:

- blocking: seconds from the call until training goes on. The previous checkpoint of either is complete before.
- complete: seconds from the call until the files are complete.
- step: seconds of a training step while the files are written, and without.

A ratio above 1 is in Drivetrain's favor. DCP writes no digests, and its index is pickled.

Then, in new processes, the memory that a rank holds: by the plan's formulas (`rank_bytes` and `gathered_bytes` of
strategies/common/memory.py), and the growth of the process's resident memory from before the model was built to the
largest value in three steps, and in a step while a checkpoint is written. Building, for which each rank has the full
model on the CPU, is not in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from drivetrain import Pipeline, strategies
from drivetrain.common.table import Table
from drivetrain.loaders import convert
from drivetrain.pipeline import Checkpoints
from drivetrain.pipeline.describe.resolve import resolve
from drivetrain.pipeline.measuring.runner import resident_peak
from drivetrain.pipeline.runs.checkpoints.directory import CheckpointDir
from drivetrain.pipeline.runs.checkpoints.fingerprint import description, fingerprint
from drivetrain.pipeline.runs.checkpoints.state import all_finite, capture_state
from drivetrain.pipeline.runs.checkpoints.writer import CheckpointWriter
from drivetrain.pipeline.telemetry.history import History
from drivetrain.pipeline.training.build import Built, build
from drivetrain.pipeline.training.rank_memory import state_bytes
from drivetrain.strategies.common.memory import rank_bytes
from drivetrain.strategies.fsdp import FSDP
from measuring import compare, save
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save

OURS, DCP = "Drivetrain", "torch's DCP, async_save"
WIDTH, BATCH, SIDE, CLASSES = 1024, 8, 8, 10
PARTS = ("seconds", "memory")
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # of tensors, whose memory glibc would keep
FIGURES = ("blocking", "complete", "step while writing")


class Wide(nn.Module):
    """A model of about so many million parameters in layers of equal size."""

    def __init__(self, millions: float = 50, classes: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(3 * SIDE * SIDE, WIDTH)
        depth = max(1, round(millions * 1e6 / WIDTH**2))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(depth))
        self.last = nn.Linear(WIDTH, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images.flatten(1))
        for block in self.blocks:
            x = x + 0.1 * block(x)
        result: torch.Tensor = self.last(x)
        return result


def pipeline_of(folder: Path, millions: float) -> Pipeline:
    """Return a pipeline on a few images of noise: its loader's position is part of a checkpoint."""
    images = np.random.default_rng(0).integers(0, 256, (4 * BATCH, SIDE, SIDE, 3), dtype=np.uint8)
    file = folder / "noise.beton"
    convert((images, np.arange(len(images)) % CLASSES), file, progress=False)
    made = Pipeline(Wide, millions=millions).load(str(file), batch_size=BATCH, image_size=SIDE, workers=1)
    return made.optimize("adamw", lr=1e-4).distribute("fsdp", devices=2, device="cpu")


def one_step(built: Built) -> float:
    engine = built.engine
    start = perf_counter()
    with engine.forward_context():
        loss = engine.model(torch.ones(BATCH // 2, 3, SIDE, SIDE)).float().square().mean()
    engine.backward(loss)
    engine.step()
    engine.barrier()
    return perf_counter() - start


Save = Callable[[int], Callable[[], None]]
"""Begins to save; returns a function that waits until all files are complete."""


def ours(built: Built, folder: Path) -> Save:
    run = uuid.UUID(int=0).hex
    store = CheckpointDir(folder / "checkpoints")
    writer = CheckpointWriter(built.engine, store, Checkpoints(keep=1, keep_best=False), run)
    facts, about = fingerprint(built.plan, built, 1), description(built.plan)

    def begin(number: int) -> Callable[[], None]:
        built.hooks.state.step = number  # which names the folder
        part, content = capture_state(
            built, run=run, strategy="fsdp", facts=facts, description=about, history=History([], {})
        )
        bad = torch.tensor(float(not all_finite(part, built.engine.plain_model)))
        assert not built.engine.reduce(bad, "sum").item()
        writer.save(part, content)
        return writer.close

    return begin


def theirs(built: Built, folder: Path) -> Save:
    # The collectives of its thread must not meet those of the steps.
    group: Any = dist.new_group(backend="gloo")

    def begin(number: int) -> Callable[[], None]:
        place = folder / f"dcp-{number}"
        model, optimizer = get_state_dict(built.engine.plain_model, built.engine.optimizer)
        state = {"model": model, "optimizer": optimizer}
        response: Any = async_save(state, checkpoint_id=str(place), process_group=group)

        def wait() -> None:
            getattr(response, "upload_completion", response).result()
            built.engine.barrier()
            if built.engine.rank == 0:
                shutil.rmtree(folder / f"dcp-{number - 1}", ignore_errors=True)

        return wait

    return begin


def slowest(values: list[float]) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(value) for value in found]


def trial(built: Built, begin: Save, number: int, steps: int) -> list[float]:
    """Return the seconds of `FIGURES`: a checkpoint that is written while so many steps are trained."""
    built.engine.barrier()
    start = perf_counter()
    wait = begin(number)
    blocking = perf_counter() - start
    step = sum(one_step(built) for _ in range(steps)) / steps
    wait()
    return slowest([blocking, perf_counter() - start, step])


def on_rank(pipeline: Pipeline, folder: Path, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds by figure and contender; those of a step also without a checkpoint."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {figure: {OURS: [], DCP: []} for figure in FIGURES}
    found["step while writing"]["without a checkpoint"] = []
    with build(resolve(pipeline)) as built:
        built.hooks.begin(built.engine, 1, built.train)
        built.begin_epoch()
        one_step(built)
        savers = {OURS: ours(built, folder), DCP: theirs(built, folder)}
        for number in range(1, rounds + 2):  # the first does not count
            plain = slowest([sum(one_step(built) for _ in range(steps)) / steps])
            for name in list(savers)[:: -1 if number % 2 else 1]:
                values = trial(built, savers[name], number, steps)
                time.sleep(0.2)  # the files' removal is not the next one's
                if number > 1:
                    for figure, value in zip(FIGURES, values, strict=True):
                        found[figure][name].append(value)
            if number > 1:
                found["step while writing"]["without a checkpoint"] += plain
    return found


def grown(before: int) -> int:
    """Return the bytes by which this process was larger, at most since `forget_peak`."""
    peak = resident_peak()
    assert peak is not None
    return peak - before


def forget_peak() -> None:
    """Let `resident_peak` begin again."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_on_rank(pipeline: Pipeline, folder: Path) -> dict[str, int]:
    """Return the bytes by which this process grew, at most: in training, and while a checkpoint is written."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    plan = resolve(pipeline)
    before = psutil.Process().memory_info().rss
    with build(plan) as built:
        forget_peak()
        built.hooks.begin(built.engine, 1, built.train)
        built.begin_epoch()
        for _ in range(3):
            one_step(built)
        training = grown(before)
        forget_peak()
        trial(built, ours(built, folder), 1, 1)
        return {"training": training, "checkpoint": grown(before)}


def memory_part(folder: Path, millions: float) -> tuple[Table, dict[str, Any]]:
    pipeline = pipeline_of(folder, millions)
    plan = resolve(pipeline)
    with torch.device("meta"):
        model = Wide(millions)
    size = sum(4 * one.numel() for one in model.parameters())
    own = rank_bytes("fsdp", 2, size, size, size / 4 * state_bytes(plan.optimization))
    training = sum(own) + FSDP().gathered_bytes(model, "fp32")
    computed = {"training": training, "checkpoint": training + own[0] + own[2]}
    os.environ |= FREED_AT_ONCE
    ranks = strategies.launch(memory_on_rank, pipeline, folder, devices=2)
    rows, results = [], {}
    for what, expected in computed.items():
        measured = [rank[what] for rank in ranks]
        ratio = max(measured) / expected
        rows.append((what, f"{expected / 1e6:,.0f}", f"{max(measured) / 1e6:,.0f}", f"{ratio:.2f}"))
        results[what] = {"computed": expected, "measured": measured, "ratio": ratio}
    heads = ("memory of a rank", "computed, MB", "measured, MB", "ratio")
    return Table(heads, rows, figures=True), results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    tables: list[Table] = []
    results: dict[str, Any] = {"parameters": options.millions * 1e6, "ranks": 2}
    if "seconds" in options.only:
        with tempfile.TemporaryDirectory() as name:
            pipeline = pipeline_of(Path(name), options.millions)
            ranks = strategies.launch(on_rank, pipeline, Path(name), options.rounds, options.steps, devices=2)
        for figure, figures in ranks[0].items():
            table, results[figure] = compare(f"{figure}, 2 ranks", "s", figures, OURS)
            tables.append(table)
    if "memory" in options.only:
        with tempfile.TemporaryDirectory() as name:
            table, results["memory"] = memory_part(Path(name), options.millions)
        tables.append(table)
    save(tables, results, options.out / "checkpoints.json")


if __name__ == "__main__":
    main()
