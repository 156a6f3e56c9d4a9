"""Training on ranks that measures the memory of the weights at the end of each epoch, on each rank."""

import ctypes
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drivetrain import Pipeline
from drivetrain.pipeline.runs.artifacts import RunArtifacts
from drivetrain.strategies.common.optimizer_state import as_held
from drivetrain.strategies.engine import LocalEngine
from torch import nn

WIDTH, DEPTH = 1024, 24
BYTES = DEPTH * (WIDTH + 1) * WIDTH * 4
"""Of the blocks' parameters: about 100 MB."""


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU())


class Wide(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.pool, self.first = nn.AdaptiveAvgPool2d(8), nn.Linear(3 * 64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(self.pool(images).flatten(1))
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return self.last(x)


def digests(state: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Of every tensor's bytes; a sum would depend on the number of threads."""
    return {name: zlib.crc32(value.contiguous().numpy().tobytes()) for name, value in state.items()}


@contextmanager
def growth(into: list[int]) -> Iterator[None]:
    """Add the bytes by which the process was larger inside the block, at its largest, than at its beginning."""
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before hides what comes
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    yield
    into.append(_status("VmHWM") - before)


def _status(name: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def watched(pipeline: Pipeline, epochs: int, torchrun: bool, **arguments: Any) -> dict[str, Any]:
    """Train on this rank. Of each export of the weights: its bytes, and those of earlier ones that are still held; and
    by how much this process grew as it kept those of each epoch."""
    exports: list[tuple[int, int]] = []
    given: list[Any] = []
    grown: list[int] = []
    export, keep = LocalEngine.export_state, RunArtifacts.keep

    def export_state(engine: LocalEngine, keep: Any = None) -> dict[str, torch.Tensor]:
        held = sum(one().untyped_storage().nbytes() for one in given if one() is not None)
        found = export(engine, keep)
        if keep is as_held:  # neither gathered nor copied
            exports.append((0, held))
            return found
        given.extend(weakref.ref(value) for value in found.values())
        exports.append((sum(value.untyped_storage().nbytes() for value in found.values()), held))
        return found

    def kept(artifacts: RunArtifacts, *given: Any, **options: Any) -> None:
        with growth(grown):
            keep(artifacts, *given, **options)

    if torchrun:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there: nothing connects
    LocalEngine.export_state, RunArtifacts.keep = export_state, kept  # type: ignore[method-assign]
    try:
        result = pipeline.fit(epochs=epochs, progress=False, **arguments)
    finally:
        LocalEngine.export_state, RunArtifacts.keep = export, keep  # type: ignore[method-assign]
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    weights = digests(result.model.state_dict())
    return {"rank": dist.get_rank(), "exports": exports, "growth": grown, "weights": weights}


def everything(pipeline: Pipeline, out: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "plain": watched(pipeline, 3, False, out=out / "plain", checkpoints=None),
        "in memory": watched(pipeline, 3, False),
        "torchrun": watched(pipeline, 2, True, out=out / "torchrun", checkpoints=None),
        "checkpoints": watched(pipeline, 1, False, out=out / "checkpoints"),
        "resumed": watched(pipeline, 2, True, resume=out / "checkpoints"),
    }
