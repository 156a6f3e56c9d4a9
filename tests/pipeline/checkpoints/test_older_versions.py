"""Checkpoints that older versions wrote still resume.

`version-0.1.0/` was written by that version: `toy.pipeline().fit(epochs=2, checkpoints=Checkpoints(every_steps=2))`,
whose losses were `LOSSES`, after its sixth step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_data import Toy

STEP = Path(__file__).parent / "version-0.1.0/step-00000006"
LOSSES = [1.2614469528198242, 0.34928664565086365]


def test_a_checkpoint_within_an_epoch(toy: Toy) -> None:
    """Its meter has the sum of the steps' losses, which newer ones weight."""
    result = toy.pipeline().fit(epochs=2, resume=STEP, progress=False)
    assert [epoch.loss for epoch in result.history.epochs] == pytest.approx(LOSSES, abs=1e-6)
