"""What the tests of synchronized BatchNorm run inside ranks, and on one device for comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from drivetrain.common.errors import StrategyError
from drivetrain.pipeline.training.loop import train_epoch
from drivetrain.strategies import get
from drivetrain.strategies.common.sync_batch_norm import sync_batch_norms
from drivetrain.transforms import GhostBatchNorm
from parity_jobs import quiet
from strategy_jobs import make_optimizer
from torch import nn

CHANNELS, SAMPLES = 3, 12


class Activated(nn.BatchNorm2d):
    """As timm's: a subclass whose own forward normalizes and goes on."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        tensors = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(input, *tensors, self.training, self.momentum, self.eps).relu()


class Own(nn.BatchNorm2d):
    """A forward without torch's function."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input - input.mean((0, 2, 3), keepdim=True)


@dataclass(frozen=True)
class Layer:
    """A layer, and the input it gets; `shares` are the samples of each rank, of the first ranks."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (CHANNELS, 4, 4)
    dtype: torch.dtype = torch.float32
    middle: float = 0.0
    channels_last: bool = False
    frozen: bool = False


LAYERS = {
    "2d": Layer(lambda: nn.BatchNorm2d(CHANNELS)),
    "1d": Layer(lambda: nn.BatchNorm1d(CHANNELS), (CHANNELS,)),
    "1d of sequences": Layer(lambda: nn.BatchNorm1d(CHANNELS), (CHANNELS, 5)),
    "3d": Layer(lambda: nn.BatchNorm3d(CHANNELS), (CHANNELS, 2, 3, 4)),
    "not affine": Layer(lambda: nn.BatchNorm2d(CHANNELS, affine=False)),
    "no statistics": Layer(lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False)),
    "cumulative": Layer(lambda: nn.BatchNorm2d(CHANNELS, momentum=None)),
    "far from 0": Layer(lambda: nn.BatchNorm2d(CHANNELS), middle=300.0),
    "float64": Layer(lambda: nn.BatchNorm2d(CHANNELS).double(), dtype=torch.float64, middle=1e4),
    "bfloat16": Layer(lambda: nn.BatchNorm2d(CHANNELS), dtype=torch.bfloat16),
    "channels last": Layer(lambda: nn.BatchNorm2d(CHANNELS), channels_last=True),
    "evaluated": Layer(lambda: nn.BatchNorm2d(CHANNELS).eval()),
    "weights frozen": Layer(lambda: nn.BatchNorm2d(CHANNELS), frozen=True),
    "with activation": Layer(lambda: Activated(CHANNELS)),
}
SHARES = {
    1: [(12,)],
    2: [(6, 6), (11, 1), (12, 0)],
    3: [(4, 4, 4), (0, 7, 5)],
    4: [(3, 3, 3, 3), (1, 0, 11, 0)],
}
"""How the samples are divided among ranks."""


def passed(layer: Layer, own: slice = slice(None)) -> dict[str, torch.Tensor]:
    """Three steps of forward and backward of one's own samples: outputs, gradients and buffers of the last."""
    torch.manual_seed(0)
    module = layer.make()
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
        parameter.requires_grad_(not layer.frozen)
    generator = torch.Generator().manual_seed(1)
    sync_batch_norms(module)
    for step in range(3):
        images = torch.randn(SAMPLES, *layer.shape, generator=generator, dtype=torch.float64) * (1 + step)
        slopes = torch.randn(SAMPLES, *layer.shape, generator=generator, dtype=torch.float64)
        images = images + layer.middle + torch.arange(SAMPLES).view(-1, *[1] * len(layer.shape))
        images = images[own].to(layer.dtype)
        if layer.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        images.requires_grad_()
        module.zero_grad()
        out = module(images)
        (out * slopes[own].to(layer.dtype)).sum().backward()
    found = {"out": out.detach(), "images": images.grad}
    found |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return found | {name: buffer.clone() for name, buffer in module.named_buffers()}


def over_ranks() -> dict[str, Any]:
    quiet()
    rank, results = dist.get_rank(), {}
    for shares in SHARES[dist.get_world_size()]:
        begin = sum(shares[:rank])
        for name, layer in LAYERS.items():
            results[f"{name} {shares}"] = passed(layer, slice(begin, begin + shares[rank]))
    results["refused"] = refused()
    results["uneven"] = {
        name: trained(name, uneven(dist.get_world_size()), sync_batchnorm=True) for name in ("ddp", "fsdp")
    }
    results["recomputed"] = {
        name: trained(name, uneven(dist.get_world_size()), sync_batchnorm=True, activation_checkpointing=is_norm)
        for name in ("ddp", "fsdp")
    }
    return results


def is_norm(_: str, module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d)


def uneven(ranks: int) -> list[int]:
    """Sizes of global batches; of the last, one rank has no sample."""
    return [8, 7, max(ranks - 1, 1)]


def trained(strategy: str, sizes: Sequence[int], **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the state after an epoch of uneven batches, of some of which the last rank has nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    engine = get(strategy, device="cpu").prepare(model, make_optimizer("sgd"), **options)
    generator, batches = torch.Generator().manual_seed(1), []
    for size in sizes:
        images = torch.randn(size, 3, 6, 6, generator=generator)
        labels = torch.randint(5, (size,), generator=generator)
        batches.append((images[engine.rank :: engine.world_size], labels[engine.rank :: engine.world_size]))
    stats = train_epoch(engine, batches, nn.CrossEntropyLoss())
    engine.sync_buffers()
    return stats.loss, engine.export_state()


def refused() -> dict[str, str]:
    ghost = nn.Sequential(nn.BatchNorm2d(CHANNELS))
    GhostBatchNorm(4).apply(ghost)
    tried = {
        "ghost": (ghost, torch.ones(2, CHANNELS, 2, 2)),
        "own": (Own(CHANNELS), torch.ones(2, CHANNELS, 2, 2)),
        "one value": (nn.BatchNorm1d(CHANNELS), torch.ones(int(dist.get_rank() == 0), CHANNELS)),
    }
    said = {}
    for name, (module, images) in tried.items():
        try:
            sync_batch_norms(module)
            module(images)
        except (StrategyError, ValueError) as error:
            said[name] = str(error)
    return said
