"""Measure what a cluster costs: steps and bytes on the wire against plain PyTorch, and data that streams from a server.

    python benchmarks/cluster.py [--only steps streaming] [--ranks 1 2 4] [--rounds 7] [--steps 6] [--photos FOLDER]
        [--images 1000] [--latency 0.02] [--rate 125e6] [--out benchmarks/results]

Steps: Drivetrain's loop with the guard against non-finite losses, which `fit` always has, and a hand-written loop, on
models with the same weights and batches in memory; CPU and gloo on loopback, one thread per rank. The bytes are those
that the interface `lo` sent during the measured steps, with TCP's headers and acknowledgements, minus its idle traffic,
by rank; the formula is that of a ring: each all-reduce, or pair of reduce-scatter and all-gather, sends 2 (n - 1) / n
of its bytes.

Streaming: a loader alone, without a model to wait for, which shows a slow source best. A file of photographs is read
from the disk, and from an HTTP server on this machine whose answers begin after `--latency` seconds, with up to
`--rate` bytes per second (`range_server.py`). Every trial begins with an empty cache, in a process that has compiled
everything. Samples from a server are compared with their checksums in epoch one, as always; local ones are not. Without
`--photos`, an ImageFolder tree of JPEGs, the photographs are noise with the spectrum of such.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from drivetrain import strategies
from drivetrain.common import machine
from drivetrain.common.storage.cache import Remote, local_copy
from drivetrain.common.table import Table
from drivetrain.loaders import FFCVLoader, convert
from drivetrain.pipeline.tasks.standard import Classification
from drivetrain.pipeline.tasks.task import TaskLoss
from drivetrain.pipeline.training.guard import NonFiniteGuard
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import train_epoch
from measuring import Contender, compare, measure, save, summarize
from PIL import Image
from range_server import serving
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

OURS, BY_HAND, LOCAL = "Drivetrain", "by hand", "local file"
WIDTH, DEPTH, BATCH, CLASSES = 512, 16, 32, 10  # the batch is a rank's
PARTS = ("steps", "streaming")
TRANSFERS = {"ddp": 2, "fsdp": 3}
"""How many times a step sends each parameter: DDP's all-reduce counts twice; FSDP2 gathers the parameters for the
forward and again for the backward, and scatters the gradients. (gloo's reduce-scatter sends as much as an all-reduce,
so that FSDP2 through gloo sends 4/3 of that.)"""
IDLE = 1.0  # seconds in which the idle traffic is counted
HEIGHT, WIDTH_OF_PHOTOGRAPH, COPIES = 375, 500, 5


def model() -> nn.Module:
    """Return a model of 4.2 million parameters in layers of equal size."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def ours(strategy: str, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """Return a function that trains on the batches with our loop."""
    engine = strategies.get(strategy, device="cpu").prepare(model(), sgd)
    guard, hooks = NonFiniteGuard(engine, "raise", lambda: ""), TrainingHooks(())
    hooks.equal_shares = True  # as `fit` knows of its loaders
    loss = TaskLoss(Classification(), functional.cross_entropy, checked=True)

    def train() -> None:
        train_epoch(engine, batches, loss, hooks, observer=guard)

    return train


def by_hand(strategy: str, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """Return a function that trains on the batches with a typical hand-written loop with a running loss."""
    wrapped = model()
    if strategy == "ddp":
        wrapped = DistributedDataParallel(wrapped, gradient_as_bucket_view=True)
    else:
        for block in list(wrapped.children())[:-1]:
            fully_shard(block)
        fully_shard(wrapped)
    optimizer = sgd(wrapped.parameters())

    def train() -> None:
        wrapped.train()
        total = torch.zeros(())
        for images, labels in batches:
            loss: Any = functional.cross_entropy(wrapped(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        total.item()

    return train


def sent() -> int:
    """Return the bytes that the interface `lo` has sent since it is up."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.lstrip().startswith("lo:")]
    return int(line.partition(":")[2].split()[8])


def idle_traffic() -> float:
    """Return the bytes per second on `lo` while all ranks wait."""
    dist.barrier()
    before = sent()
    time.sleep(IDLE)
    return (sent() - before) / IDLE


def steps_on_ranks(steps: int, rounds: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """On each rank: measure steps/s and bytes per step and rank, by strategy and contender."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    batches = [(torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))) for _ in range(steps)]
    idle = idle_traffic()
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for strategy in TRANSFERS:
        counted: dict[str, list[float]] = {OURS: [], BY_HAND: []}

        def trial(name: str, train: Callable[[], None], counted: dict[str, list[float]] = counted) -> Contender:
            def run() -> float:
                dist.barrier()
                before, start = sent(), perf_counter()
                train()
                dist.barrier()
                seconds = perf_counter() - start
                counted[name].append((sent() - before - idle * seconds) / steps / ranks)
                return steps / seconds

            return run

        contenders = {
            OURS: trial(OURS, ours(strategy, batches)), BY_HAND: trial(BY_HAND, by_hand(strategy, batches)),
        }  # fmt: skip
        figures = measure(contenders, rounds)
        found[strategy] = {
            "steps/s": figures,
            "bytes": {name: values[-rounds:] for name, values in counted.items()},
        }
    return found


def steps_part(numbers: list[int], steps: int, rounds: int) -> tuple[list[Table], dict[str, Any]]:
    """Measure both loops on each number of ranks."""
    size = sum(parameter.nbytes for parameter in model().parameters())
    rows: dict[str, Any] = {}
    tables, lines = [], []
    for ranks in numbers:
        found = strategies.launch(steps_on_ranks, steps, rounds, devices=ranks, device="cpu")[0]
        for strategy, figures in found.items():
            title = f"{strategy}, {ranks} rank{'s' * (ranks > 1)}"
            table, speeds = compare(title, "steps/s", figures["steps/s"], OURS)
            tables.append(table)
            formula = TRANSFERS[strategy] * (ranks - 1) / ranks * size
            sizes = {name: summarize(values) for name, values in figures["bytes"].items()}
            rows.setdefault(strategy, {})[ranks] = {
                "steps": speeds, "bytes_per_step_and_rank": sizes, "formula": formula,
            }  # fmt: skip
            over = f"{sizes[OURS]['median'] / formula:.3f}" if formula else ""
            cells = [f"{value / 1e6:.3f}" for value in (*(sizes[n]["median"] for n in sizes), formula)]
            lines.append((strategy, str(ranks), *cells, over))
    heads = ("strategy", "ranks", OURS, BY_HAND, "formula", f"{OURS} / formula")
    tables.append(Table(heads, lines, "MB on the wire, by step and rank", figures=True))
    return tables, {"parameter_bytes": size, "by_strategy": rows}


def photographs(folder: Path, images: int) -> Path:
    """Write JPEGs of noise whose amplitude falls with its frequency, as in photographs; return the folder. Every one is
    there several times, because drawing takes long."""
    draws = np.random.default_rng(0)
    for number in range(0, images, COPIES):
        total = np.zeros((HEIGHT, WIDTH_OF_PHOTOGRAPH, 3), dtype=np.float32)
        for octave in range(2, 8):
            noise = draws.integers(0, 256, (3 << octave, 4 << octave, 3), dtype=np.uint8)
            scaled = Image.fromarray(noise).resize((WIDTH_OF_PHOTOGRAPH, HEIGHT), Image.Resampling.BICUBIC)
            total += (np.asarray(scaled, dtype=np.float32) - 127.5) * 2.0 ** (1 - octave / 1.3)
        file = io.BytesIO()
        Image.fromarray((127.5 + total).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        for copy in range(number, min(number + COPIES, images)):
            path = folder / f"{number % 10}" / f"{copy:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.getvalue())
    return folder


def two_epochs(source: str | Path, cache: Path | None, options: dict[str, Any]) -> dict[str, float]:
    """Return the seconds to the first batch, of epoch one and of epoch two. Starting the loader belongs to epoch
    one."""
    start = perf_counter()
    path = source if cache is None else local_copy(str(source), Remote(cache))
    with FFCVLoader(path, **options) as loader:
        marks: list[float] = []
        for _ in loader:
            marks = marks or [perf_counter()]
        marks.append(perf_counter())
        for _ in loader:
            pass
        marks.append(perf_counter())
    return {"first batch": marks[0] - start, "epoch one": marks[1] - start, "epoch two": marks[2] - marks[1]}


def streaming_part(
    photos: Path | None, images: int, latency: float, rate: float, rounds: int
) -> tuple[list[Table], dict[str, Any]]:
    """Measure an epoch from a server, and the next one."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch) / "data"
        folder.mkdir()
        path = folder / "photos.beton"
        convert(photos or photographs(Path(scratch) / "images", images), path, progress=False)
        options: dict[str, Any] = {"batch_size": 64, "image_size": 224, "workers": machine.cores()}
        servers = {"HTTP": (0.0, 0.0), f"HTTP, {1000 * latency:g} ms": (latency, 0.0)}
        if rate:
            servers[f"HTTP, {1000 * latency:g} ms, {rate / 1e6:g} MB/s"] = latency, rate
        figures: dict[str, dict[str, list[float]]] = {}

        def trial(name: str, source: str | Path) -> Contender:
            def run() -> float:
                with tempfile.TemporaryDirectory() as cache:
                    times = two_epochs(source, None if name == LOCAL else Path(cache), options)
                for what, seconds in times.items():
                    figures.setdefault(what, {}).setdefault(name, []).append(seconds)
                return times["epoch one"]

            return run

        contenders = {LOCAL: trial(LOCAL, path)}
        for name, how in servers.items():
            contenders[name] = trial(name, f"{stack.enter_context(serving(folder, *how)).address}/{path.name}")
        measure(contenders, rounds)
        tables, rows = [], {}
        for what, by_name in figures.items():
            measured = {name: by_name[name][-rounds:] for name in contenders}
            table, rows[what] = compare(what, "s", measured, LOCAL)
            tables.append(table)
        with FFCVLoader(path, **options) as loader:
            facts = {"images": len(loader.indices), "bytes": path.stat().st_size, **options}
    return tables, {"data": facts, "latency_s": latency, "rate_bytes_per_s": rate, "seconds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--rate", type=float, default=125e6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    tables: list[Table] = []
    results: dict[str, Any] = {"rounds": options.rounds, "steps_of_a_trial": options.steps}
    if "steps" in options.only:
        shown, results["steps"] = steps_part(options.ranks, options.steps, options.rounds)
        tables += shown
    if "streaming" in options.only:
        shown, results["streaming"] = streaming_part(
            options.photos, options.images, options.latency, options.rate, options.rounds
        )
        tables += shown
    save(tables, results, options.out / "cluster.json")


if __name__ == "__main__":
    main()
