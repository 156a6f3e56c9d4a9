"""The device that the tests marked `gpu` are about, the proof that it worked, and what ranks do on it.

They are skipped where torch sees no CUDA device. With DRIVETRAIN_REHEARSE_GPU=1 they run on the CPU instead, less what
only CUDA can show: so their own code is known to run before a GPU is there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drivetrain import strategies
from pipeline_data import Toy, numbers
from torch import nn
from torch.nn.functional import cross_entropy

REHEARSED = os.environ.get("DRIVETRAIN_REHEARSE_GPU") == "1"
COUNT = torch.cuda.device_count() if torch.cuda.is_available() and not REHEARSED else 0
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not COUNT and not REHEARSED,
        reason="no CUDA device: torch.cuda.is_available() is False (DRIVETRAIN_REHEARSE_GPU=1 rehearses on the CPU)",
    ),
]
CUDA_ONLY = pytest.mark.skipif(not COUNT, reason="only CUDA can show it: there is no CUDA device")
TWO = pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA devices, and torch sees {COUNT}")


@dataclass(frozen=True)
class Device:
    """Where a test works: `"cuda"`, or `"cpu"` in a rehearsal, in which assertions about CUDA do not count (`real`)."""

    name: str
    real: bool

    def holds(self, *tensors: torch.Tensor) -> None:
        assert tensors
        assert {tensor.device.type for tensor in tensors} == {self.name}


def allocations() -> int:
    return sum(
        torch.cuda.memory_stats(index).get("allocation.all.allocated", 0)
        for index in range(COUNT)
        if torch.cuda.is_initialized()
    )


@contextmanager
def at_work() -> Iterator[Device]:
    """Give the device; assert at the end that something was computed on it, in this process."""
    before = allocations()
    yield Device("cuda" if COUNT else "cpu", bool(COUNT))
    if COUNT:
        torch.cuda.synchronize()
        assert allocations() > before, "the test passed without the GPU"


def rank_work() -> int:
    """Return, in a rank, the most bytes that it has held on its GPU; 1 in a rehearsal, where there is none."""
    return torch.cuda.max_memory_allocated() if COUNT else 1


def fitted(toy: Toy, model: Any = None, strategy: str = "single", **distribution: Any) -> Any:
    """Two epochs of the toy pipeline."""
    return toy.pipeline(model).distribute(strategy, **distribution).fit(epochs=2, progress=False)


def agree(found: Any, expected: Any, **tolerance: float) -> None:
    """The numbers of two results, epoch by epoch."""
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, **tolerance)


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
    found.bytes = rank_work()
    found.backend = dist.get_backend_config() if dist.is_initialized() else ""
    return found


PRECISIONS = ("fp32", "bf16")


def train_all(names: list[str], device: str) -> dict[str, Found]:
    given = product(names, PRECISIONS)
    return {f"{name} {p}": train(name, device, precision=p, clip_norm=0.5) for name, p in given}


def behind_others(name: str, factor: float) -> tuple[bool, dict[str, float]]:
    """On each rank: whether the last of three steps in fp16 was skipped, and the sums of the weights. The stream on
    which the scale of the loss is copied is busy."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    engine: Any = strategies.get(name).prepare(model, lambda p: torch.optim.SGD(p, lr=0.1), precision="fp16")
    unscale = engine._scaler.unscale_

    def later(optimizer: torch.optim.Optimizer) -> None:
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        unscale(optimizer)

    engine._scaler.unscale_ = later
    for _ in range(3):
        with engine.forward_context():
            loss = engine.model(torch.ones(8, 64, device="cuda")).float().square().mean() * factor
        engine.backward(loss)
        engine.step()
    return engine.skipped, {key: value.sum().item() for key, value in engine.export_state().items()}
