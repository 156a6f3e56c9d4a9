"""Runs that must be the same, bit for bit."""

from pathlib import Path
from typing import Any

import torch
from drivetrain import Pipeline
from drivetrain.pipeline import Checkpoints
from pipeline_data import numbers


def assert_same_weights(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found.model.state_dict(), expected.model.state_dict(), rtol=0, atol=0)


def assert_same_run(found: Any, expected: Any) -> None:
    """Every number of every epoch, and every bit of the weights."""
    assert numbers(found) == numbers(expected)
    assert [epoch.lr for epoch in found.history.epochs] == [epoch.lr for epoch in expected.history.epochs]
    assert_same_weights(found, expected)


def assert_resumes(pipeline: Pipeline, folder: Path, steps: tuple[int, ...] = (3, 4)) -> None:
    """From checkpoints in the middle of the first of two epochs of four steps, and at its end."""
    every = Checkpoints(every_steps=1, keep=100)
    whole = pipeline.fit(epochs=2, progress=False, out=folder, checkpoints=every)
    for step in steps:
        place = folder / f"checkpoints/step-{step:08d}"
        assert_same_run(pipeline.fit(epochs=2, progress=False, resume=place), whole)
