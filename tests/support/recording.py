"""A model that keeps which samples it was trained on. A module, because recipes name it."""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_data import Sleepy


class Recording(Sleepy):
    """Under torchrun, appends a line per training step to a file in the folder `$SEEN_SAMPLES`: the step, counted from
    1, which checkpoints keep, and the CRC of each sample.

    While the file `$SLOW` exists, a step of a single rank takes a second: time for another machine to start.

    Args:
        seconds: a forward takes at least.
    """

    steps: torch.Tensor

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._file: Path | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result = super().forward(images)
        if self.training and "RANK" in os.environ and len(images) > 2:  # two images try it before training
            self.steps += 1
            if os.environ["WORLD_SIZE"] == "1" and Path(os.environ["SLOW"]).exists():
                time.sleep(1)
            self._keep(images)
        return result

    def _keep(self, images: torch.Tensor) -> None:
        if self._file is None:
            self._file = Path(os.environ["SEEN_SAMPLES"], _name())
        with self._file.open("a") as file:
            crcs = [zlib.crc32(image.contiguous().numpy().tobytes()) for image in images]
            file.write(json.dumps([int(self.steps), crcs]) + "\n")


def _name() -> str:
    """When rank 0 began, this rank, and the number of ranks. Every start of the ranks has keys of its own."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("began", f"{time.time_ns()}")
    return f"{store.get('began').decode()}-{dist.get_rank()}-{dist.get_world_size()}"
