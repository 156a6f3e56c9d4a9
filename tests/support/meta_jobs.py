"""Models on the meta device, and what ranks do with them. A module, because ranks import it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from drivetrain import Pipeline
from drivetrain.pipeline import Checkpoints, FitResult
from pipeline_data import CLASSES, Toy, numbers, plain_model
from torch import nn


def on_meta() -> nn.Module:
    """Its `reset_parameters` give what its constructors do."""
    with torch.device("meta"):
        return plain_model()


class Scaled(nn.Module):
    """With values that nothing but the constructor sets, also in a buffer that the state dict leaves out."""

    shift: torch.Tensor

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.layers = plain_model(classes)
        self.scale = nn.Parameter(torch.full((classes,), 0.5))
        self.register_buffer("shift", torch.ones(classes), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(images) * self.scale + self.shift
        return found


class Partly(Scaled):
    """Its `reset_parameters` forgets a buffer of each kind; those of its layers set all of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("bytes", torch.zeros(2, dtype=torch.uint8))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("written", torch.ones(2, dtype=torch.bool))
        self.register_buffer("replaced", torch.ones(2))

    def reset_parameters(self) -> None:
        self.scale.data.fill_(0.5)
        self.written.fill_(True)
        self.replaced = torch.ones(2)


def on(device: str, make: Callable[[], nn.Module]) -> nn.Module:
    """A module, so that a run does not depend on its factory's code."""
    with torch.device(device):
        return make()


def sharded(toy: Toy, model: Any, ranks: int = 2) -> Pipeline:
    return toy.pipeline(model).distribute("fsdp", devices=ranks, device="cpu")


def kept(result: FitResult) -> tuple[Any, dict[str, torch.Tensor]]:
    return numbers(result), result.model.state_dict()


def on_both(toy: Toy, folder: Path) -> dict[str, Any]:
    """Runs whose models are on the CPU and on the meta device; and evaluations of their weights."""
    torch.set_num_threads(1)
    often = Checkpoints(every_steps=3, keep=9)
    torch.manual_seed(7)
    first = sharded(toy, on("cpu", Scaled)).fit(epochs=2, out=folder, checkpoints=often, progress=False)
    step = folder / "checkpoints" / "step-00000006"
    found: dict[str, Any] = {"first": kept(first)}
    for device in ("cpu", "meta"):
        model = on(device, Scaled)
        found[f"resumed, {device}"] = kept(sharded(toy, model).fit(epochs=2, resume=step, progress=False))
        for place in (step, folder):
            begun = sharded(toy, model).fit(epochs=1, init_from=place, progress=False)
            found[f"begun with {place.name}, {device}"] = kept(begun)
        found[f"evaluated, {device}"] = sharded(toy, model).evaluate(folder)
    found["from the seed"] = numbers(sharded(toy, on_meta).fit(epochs=1, progress=False))
    return found
