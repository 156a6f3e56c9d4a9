"""Models whose state is more than a state dict of real numbers. A module, because ranks import it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from drivetrain import Pipeline
from drivetrain.common.model_state import unlisted_tensors
from drivetrain.pipeline import Checkpoints
from pipeline_data import CLASSES, attempt
from torch import nn


class Remembering(nn.Module):
    """Non-persistent buffers that training changes, in place and by assignment, and that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, CLASSES)
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("spread", torch.ones(8), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(images))
        if self.training:
            seen = x.detach()
            self.mean.lerp_(seen.mean((0, 2, 3)), 0.3)
            self.spread = self.spread.lerp(seen.amax((0, 2, 3)), 0.3)
            self.steps += 1
        x = (x - self.mean.view(-1, 1, 1)) / self.spread.view(-1, 1, 1) + 0.01 * self.steps
        return self.head(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


class Growing(Remembering):
    """A non-persistent buffer that the first forward sets, and that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen = images.mean().reshape(1)
            self.late = seen if self.late is None else torch.cat([seen, self.late])[:3]
        return super().forward(images) * (1 if self.late is None else 1 + self.late.sum())


class Complex(nn.Module):
    """Complex parameters and buffers, of both precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, CLASSES)
        self.turn = nn.Parameter(torch.randn(8, 1, 1, dtype=torch.complex64))
        self.register_buffer("wave", torch.ones(8, 1, 1, dtype=torch.complex64))
        self.register_buffer("wide", torch.full((8, 1, 1), 0.5j, dtype=torch.complex128), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.conv(images) * self.turn
        if self.training:
            mean = x.detach().mean((0, 2, 3)).view(-1, 1, 1)
            self.wave.lerp_(mean, 0.3)
            self.wide.lerp_(mean.to(torch.complex128), 0.3)
        x = (x - self.wave).abs() + self.wide.to(torch.complex64).real
        return self.head(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


def kept(pipelines: dict[str, Pipeline], folder: Path) -> dict[str, Any]:
    """Train each pipeline, saving into `folder / name`.

    By name: its metrics; those of its result, of its folder, of its last checkpoint, and of a resume from its middle;
    and the largest difference of a tensor after the resume; or the error as text.
    """
    torch.set_num_threads(1)
    return {name: attempt(partial(trained, pipeline, folder / name)) for name, pipeline in pipelines.items()}


def trained(pipeline: Pipeline, out: Path) -> tuple[Any, ...]:
    saves = Checkpoints(every_steps=3, keep=9)
    result = pipeline.fit(epochs=2, progress=False, out=out, checkpoints=saves)
    again = pipeline.fit(epochs=2, progress=False, resume=out / "checkpoints/step-00000003")
    return (
        result.metrics, result.evaluate(), pipeline.evaluate(out),
        pipeline.evaluate(out / "checkpoints/step-00000008"), again.metrics, again.evaluate(),
        difference(result.model, again.model),
    )  # fmt: skip


def difference(left: nn.Module, right: nn.Module) -> float:
    """The largest of any tensor; infinite if names or shapes differ."""
    ours, theirs = ({**m.state_dict(), **unlisted_tensors(m)} for m in (left, right))
    if {n: t.shape for n, t in ours.items()} != {n: t.shape for n, t in theirs.items()}:
        return float("inf")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
