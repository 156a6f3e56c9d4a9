"""A model that keeps which samples it was trained on. A module, because recipes name it."""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path

import torch
from pipeline_data import Sleepy


class Recording(Sleepy):
    """Under torchrun, appends a line per training step to a file in the folder `$SEEN_SAMPLES`: the step, counted from 1,
    which checkpoints keep, and the CRC of each sample.

    Args:
        seconds: a forward takes at least.
        alone: seconds that a step of one rank takes in addition, while another machine is starting.
    """

    steps: torch.Tensor

    def __init__(self, seconds: float, alone: float = 0) -> None:
        super().__init__(seconds)
        self.alone = alone
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._file: Path | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result = super().forward(images)
        if self.training and "RANK" in os.environ and len(images) > 2:  # two images try it before training
            self.steps += 1
            time.sleep(self.alone * (os.environ["WORLD_SIZE"] == "1"))
            self._keep(images)
        return result

    def _keep(self, images: torch.Tensor) -> None:
        names = ("MASTER_PORT", "RANK", "WORLD_SIZE")
        if self._file is None:
            parts = [f"{time.time_ns()}", *(os.environ[name] for name in names)]
            self._file = Path(os.environ["SEEN_SAMPLES"], "-".join(parts))
        with self._file.open("a") as file:
            crcs = [zlib.crc32(image.contiguous().numpy().tobytes()) for image in images]
            file.write(json.dumps([int(self.steps), crcs]) + "\n")
