"""What ranks do in the GPU tests of strategies. A module, because ranks import it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gpu_device
import torch
import torch.distributed as dist
from drivetrain import strategies
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, BATCH, PIXELS = 4, 8, 16


@dataclass
class Found:
    losses: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    device: str = ""
    ranks: int = 0
    backend: str = ""
    bytes: int = 0


def model() -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU()]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.Sequential(*block), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(256, 5),
    )  # fmt: skip


def options_of(name: str) -> dict[str, Any]:
    """Stage 3 would keep parameters as small as these whole."""
    if name.startswith("deepspeed"):
        return {"config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
    return {}


def train(name: str, device: str, **options: Any) -> Found:
    """The same global batches on any number of ranks; the losses are those of the global batch."""
    strategy = strategies.get(name, device=device, **options_of(name))
    engine = strategy.prepare(model(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), **options)
    found = Found(device=engine.device.type, ranks=engine.world_size)
    share = BATCH // engine.world_size
    own = slice(engine.rank * share, (engine.rank + 1) * share)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)[own].to(engine.device)
        labels = torch.randint(5, (BATCH,), generator=generator)[own].to(engine.device)
        with engine.forward_context():
            logits = engine.model(images)
        loss = cross_entropy(logits.float(), labels)
        engine.backward(loss)
        engine.step()
        found.losses.append(float(engine.reduce(loss.detach())))
    found.state = engine.export_state()
    found.bytes = gpu_device.rank_work()
    if dist.is_initialized():
        found.backend = (
            dist.get_backend_config() if hasattr(dist, "get_backend_config") else dist.get_backend()
        )
    return found


def train_all(names: list[str], device: str) -> dict[str, Found]:
    """Each strategy in turn, in fp32 and bf16, on this rank."""
    found: dict[str, Found] = {}
    for name in names:
        for precision in ("fp32", "bf16"):
            found[f"{name} {precision}"] = train(name, device, precision=precision, clip_norm=0.5)
    return found
