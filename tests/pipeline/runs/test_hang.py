"""A rank of a run hangs: the run ends at its `timeout`, with the stacks of all ranks in its folder."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from drivetrain.common.errors import StrategyError
from forked_ranks import STARTED
from pipeline_data import Toy, plain_model
from straggler_jobs import HangingCallback, HangingForward

pytestmark = [pytest.mark.process, pytest.mark.long]
TIMEOUT = 8 if STARTED else 4
"""Seconds that a rank may take to start, too."""


@pytest.mark.parametrize(
    ("model", "callbacks", "where"),
    [
        (partial(HangingForward, 0.0), [], "in forward"),
        pytest.param(plain_model, [HangingCallback()], "in on_step_end", marks=pytest.mark.slow),
    ],
)
def test_the_stacks_are_in_the_folder(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, callbacks: list[Any], where: str
) -> None:
    pipeline = toy.pipeline(model).distribute("ddp", devices=2, device="cpu", timeout=TIMEOUT)
    # For the error of another rank, which none raises.
    monkeypatch.setattr("drivetrain.strategies.launching.launcher._ECHO_PATIENCE", 0.5)
    place = tmp_path / "stacks.txt"
    said = rf"(?s)The stacks of all ranks are in {re.escape(str(place))}\..*(Run the same|start the training)"
    with pytest.raises(StrategyError, match=said):
        pipeline.fit(epochs=1, out=tmp_path, callbacks=callbacks, progress=False)
    _, first, second = place.read_text().split("--- rank ")
    assert "gloo" in first
    assert where in second
