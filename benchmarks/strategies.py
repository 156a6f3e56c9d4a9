"""Compare each strategy's memory per parameter with ZeRO's formulas, and its step time with the backend's alone.

    python benchmarks/strategies.py [--rounds 9] [--steps 5] [--ranks 1 2 4] [--out benchmarks/results]

Bytes are counted on every rank between backward and step, with AdamW in fp32; the table shows the largest rank. Step
times are measured on two ranks, interleaving Drivetrain's engine and the backend called by hand on models with the same
weights; a ratio above 1 is in Drivetrain's favor. CPU and gloo, one thread per rank.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from drivetrain import strategies
from drivetrain.common.table import Table
from drivetrain.strategies.common.memory import adamw_bytes, held_bytes
from drivetrain.strategies.deepspeed.strategy import import_deepspeed
from measuring import Contender, compare, measure, save
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WIDTH, DEPTH, BATCH = 512, 16, 32
NAMES = [
    "ddp",
    "zero_redundancy",
    "fairscale_oss",
    "fairscale_sharded_ddp",
    "fsdp",
    "fsdp_grad_op",
    "fsdp_cpu_offload",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
]
OURS, BY_HAND = "Drivetrain", "by hand"


def model() -> nn.Module:
    """Return a model of 4.2 million parameters in layers of equal size."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 8))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def loss_of(wrapped: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return wrapped(images).square().mean()


def held(names: list[str]) -> dict[str, tuple[int, int, int, int]]:
    """Return the bytes of parameters, gradients and optimizer state on this rank, and the number of parameters."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name in names:
        engine = strategies.get(name, device="cpu").prepare(model(), adamw)
        for _ in range(2):
            engine.backward(loss_of(engine.model, torch.randn(BATCH, WIDTH)))
            bytes_ = held_bytes(engine)
            engine.step()
        found[name] = (bytes_.parameters, bytes_.gradients, bytes_.optimizer, bytes_.count)
    return found


Step = Callable[[torch.Tensor], None]
"""One training step on a batch `(BATCH, WIDTH)`."""


def step_of(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(images: torch.Tensor) -> None:
        loss_of(wrapped, images).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand_ddp() -> Step:
    wrapped = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    return step_of(wrapped, adamw(wrapped.parameters()))


def by_hand_zero() -> Step:
    wrapped = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    return step_of(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-3))


def by_hand_fsdp() -> Step:
    wrapped = model()
    for block in list(wrapped.children())[:-1]:
        fully_shard(block)
    fully_shard(wrapped)
    return step_of(wrapped, adamw(wrapped.parameters()))


def by_hand_deepspeed(stage: int) -> Step:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    with import_deepspeed(torch.device("cpu")) as deepspeed:
        plain = model()
        wrapped, *_ = deepspeed.initialize(
            model=plain, optimizer=adamw(plain.parameters()), config=config, dist_init_required=False
        )

    def step(images: torch.Tensor) -> None:
        wrapped.backward(loss_of(wrapped, images))
        wrapped.step()

    return step


HAND: dict[str, Callable[[], Step]] = {
    "ddp": by_hand_ddp,
    "zero_redundancy": by_hand_zero,
    "fsdp": by_hand_fsdp,
    "deepspeed_stage_2": partial(by_hand_deepspeed, 2),
    "deepspeed_stage_3": partial(by_hand_deepspeed, 3),
}


def ours(name: str, steps: int, images: torch.Tensor) -> Contender:
    """Time a step of our engine."""
    engine = strategies.get(name, device="cpu").prepare(model(), adamw)

    def trial() -> float:
        engine.barrier()
        start = perf_counter()
        for _ in range(steps):
            with engine.forward_context():
                loss = loss_of(engine.model, images)
            engine.backward(loss)
            engine.step()
        engine.barrier()
        return (perf_counter() - start) / steps

    return trial


def theirs(name: str, steps: int, images: torch.Tensor) -> Contender:
    """Time a step of the backend."""
    step = HAND[name]()

    def trial() -> float:
        torch.distributed.barrier()
        start = perf_counter()
        for _ in range(steps):
            step(images)
        torch.distributed.barrier()
        return (perf_counter() - start) / steps

    return trial


def times(steps: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds per step, by strategy and contender."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    images = torch.randn(BATCH, WIDTH)
    return {
        name: measure({OURS: ours(name, steps, images), BY_HAND: theirs(name, steps, images)}, rounds) for name in HAND
    }


def bytes_table(ranks: list[int]) -> tuple[Table, dict[str, Any]]:
    """Measure the largest rank's bytes per parameter, and their ratio to the formula."""
    rows: dict[str, Any] = {}
    lines = []
    for number in ranks:
        per_rank = strategies.launch(held, NAMES, devices=number)
        for name in NAMES:
            largest = max((rank[name] for rank in per_rank), key=lambda found: sum(found[:3]))
            parts = [part / largest[3] for part in largest[:3]]
            formula = sum(adamw_bytes(name, number))
            ratio = sum(parts) / formula
            rows.setdefault(name, {})[number] = {
                "parameters": parts[0], "gradients": parts[1], "optimizer": parts[2],
                "formula": formula, "ratio": ratio,
            }  # fmt: skip
            cells = [f"{value:.2f}" for value in (*parts, sum(parts), formula)]
            lines.append((name, str(number), *cells, f"{ratio:.3f}"))
    heads = ("strategy", "N", "param", "grad", "optim", "sum", "ZeRO", "ratio")
    return Table(heads, lines, "bytes per parameter, N ranks", figures=True), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    table, rows = bytes_table(options.ranks)
    tables, results = [table], {"bytes_per_parameter": rows, "step": {}}
    for name, figures in strategies.launch(times, options.steps, options.rounds, devices=2)[0].items():
        compared, results["step"][name] = compare(f"step, {name}, 2 ranks", "s", figures, OURS)
        tables.append(compared)
    save(tables, results, options.out / "strategies.json")


if __name__ == "__main__":
    main()
