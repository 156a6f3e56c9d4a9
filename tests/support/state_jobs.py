"""What the tests of exported state run inside ranks, and on one device for comparison."""

from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from drivetrain import strategies
from drivetrain.strategies import OptimizerState
from drivetrain.transforms import NoWeightDecay
from parity_jobs import OFTEN, Run, batch, one_step, options_of, quiet
from torch import nn

BEFORE, AFTER = 2, 2
ITSELF = "adamw"
"""The optimizer whose state goes from a strategy to itself; `make test-all` has all, from each strategy to each."""
OPTIMIZERS = [ITSELF, "momentum", "plain sgd"]
QUICK = [(name, kind) for name in OFTEN for kind in OPTIMIZERS if kind != "plain sgd" or name in ("ddp", "fsdp")]
"""What `make test` trains: an optimizer without state is exported as one that has not stepped, which all have."""


class Stateful(nn.Module):
    """Tied and frozen weights, and buffers in float64 and integers; results do not depend on how a batch is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 4, 4)
        self.first.bias.requires_grad_(False)
        self.norm = nn.GroupNorm(2, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.head = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(x.detach().double().mean((0, 2, 3)))
            self.count.add_(1)
        x = self.norm(self.first(x)).mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Exported:
    """The state of a training run after some steps, and the losses of the next steps if it continues."""

    state: dict[str, torch.Tensor]
    optimizer: OptimizerState
    losses: list[float]


def factory(name: str, lr: float):
    if name == "adamw":
        return NoWeightDecay().optimizer(lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.1))
    options = {"lr": 10 * lr, "momentum": 0.9 if name == "momentum" else 0.0, "weight_decay": 0.01}
    return NoWeightDecay().optimizer(lambda p: torch.optim.SGD(p, **options))


def prepare(strategy: str, optimizer: str, seed: int, lr: float):
    torch.manual_seed(seed)
    chosen = strategies.get(strategy, device="cpu", **options_of(strategy))
    return chosen.prepare(Stateful(), factory(optimizer, lr), clip_norm=0.5, accumulate=2)


def losses(engine, first: int, steps: int) -> list[float]:
    engine.model.train()
    return [one_step(engine, step, *batch(step, 16), Run()) for step in range(first, first + steps)]


def exported(strategy: str, optimizer: str, steps: int = BEFORE) -> Exported:
    engine = prepare(strategy, optimizer, seed=0, lr=0.01)
    losses(engine, 0, steps)
    engine.sync_buffers()
    state, optimizer_state = engine.export_state(), engine.export_optimizer()
    return Exported(state, optimizer_state, losses(engine, steps, AFTER))


def imported(strategy: str, optimizer: str, given: Exported, steps: int = BEFORE) -> Exported:
    """A new engine with other weights and another learning rate takes the state over, exports it again, and trains
    on."""
    engine = prepare(strategy, optimizer, seed=100 + steps, lr=7.0)
    losses(engine, 90, 1)  # it has trained before, and has state of its own that must go
    engine.import_state(given.state)
    engine.import_optimizer(given.optimizer)
    state, optimizer_state = engine.export_state(), engine.export_optimizer()
    return Exported(state, optimizer_state, losses(engine, steps, AFTER))


def export_all(names: list[str]) -> dict[tuple[str, str], Exported]:
    quiet()
    return {(name, kind): exported(name, kind) for name in names for kind in OPTIMIZERS}


def import_all(names: list[str], given: dict[tuple, Exported]) -> dict[tuple, Exported]:
    quiet()
    pairs = product(names, given.items())
    return {(name, source, kind): imported(name, kind, state) for name, ((source, kind), state) in pairs}


def everything(pairs: list[tuple[str, str]], alone: dict[tuple[str, str], Exported]) -> dict[str, object]:
    """One launch: each strategy's export, the import of it into itself, and of what one device has exported."""
    quiet()
    names = list(dict.fromkeys(name for name, _ in pairs))
    own = {(name, kind): exported(name, kind) for name, kind in pairs}
    results: dict[str, object] = {"exported": own}
    results["imported"] = {(name, kind): imported(name, kind, alone["single", kind]) for name, kind in pairs}
    for name in names:
        results[f"{name} to itself"] = imported(name, ITSELF, own[name, ITSELF])
    results["unstepped"] = {n: imported(n, "adamw", exported(n, "adamw", steps=0), steps=0) for n in names}
    results["kept"] = {name: kept(name) for name in names}
    return results


def kept(strategy: str) -> tuple[list[str], list[str]]:
    """Names of what a rank has of exports that only rank 0 wants, and only of the head."""
    engine = prepare(strategy, "adamw", 0, 0.01)
    losses(engine, 0, 1)

    def wanted(name: str) -> bool:
        return dist.get_rank() == 0 and name.startswith("head")

    return list(engine.export_state(wanted)), list(engine.export_optimizer(wanted).entries)
