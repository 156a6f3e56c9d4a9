"""What ranks do in the tests of runs at an address. A module, because ranks import it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from drivetrain import Checkpoints, Pipeline
from pipeline_data import numbers


def train_apart(pipeline: Pipeline, folder: Path, out: str) -> tuple[list[Any], list[Any], list[str]]:
    """On each rank, as on a machine of its own that shares nothing: train three epochs, and the same in two runs, of
    which the first ended within the upload of its last checkpoint, and the second begins on empty machines.

    Returns:
        The numbers of the undisturbed run and of the two; and the files that are left on this machine.
    """
    cache = folder / f"machine {dist.get_rank()}"
    with mock.patch.dict(os.environ, {"DRIVETRAIN_DATA": str(cache)}):
        expected = numbers(pipeline.fit(epochs=3, progress=False))
        pipeline.fit(epochs=2, out=out, progress=False, checkpoints=Checkpoints(every_steps=3))
        shutil.rmtree(cache)
        dist.barrier()
        if dist.get_rank() == 0:
            (Path(out.removeprefix("file://")) / "checkpoints/step-00000008/state.json").unlink()
        dist.barrier()
        resumed = pipeline.fit(epochs=3, out=out, progress=False, resume="auto")
        assert resumed.history.facts["resumed"][0]["step"] == 6
    return expected, numbers(resumed), sorted(path.name for path in cache.rglob("*") if path.is_file())
