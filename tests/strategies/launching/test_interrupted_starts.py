"""Ctrl-C while a process starts: `Popen` would forget it, and it would go on."""

import signal
import subprocess
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import pytest
from drivetrain import Pipeline
from drivetrain.pipeline.ledger.variant import in_turn
from drivetrain.pipeline.measuring.runner import ProcessRunner, Variant
from drivetrain.strategies import launch
from pipeline_data import Toy, plain_model

pytestmark = pytest.mark.process


def _rank(_: Toy) -> None:
    launch(int, devices=1)


def _variant(toy: Toy) -> None:
    spec = Pipeline(plain_model).load(toy.train, batch_size=16, image_size=8).optimize("sgd", lr=0.1)
    ProcessRunner(Variant(in_turn("as given"), spec), {}, 2, perf_counter() + 60)


@pytest.mark.parametrize("start", [_rank, _variant])
def test_ctrl_c_within_a_start_leaves_no_process(
    start: Any, toy: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, started = getattr(subprocess, "_fork_exec"), []  # noqa: B009  it is not in the types

    def interrupted(*args: Any) -> int:
        started.append(real(*args))
        signal.raise_signal(signal.SIGINT)  # Popen does not know the process yet
        return int(started[-1])

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "_fork_exec", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(toy)
    (process,) = started
    assert not psutil.pid_exists(process)  # not even as a zombie: it was waited for
