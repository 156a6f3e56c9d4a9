"""A history has the loss and learning rate of single steps, which the curves show."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from drivetrain import Callback, Checkpoints
from drivetrain.pipeline import RunView
from drivetrain.pipeline.runs import artifacts
from drivetrain.pipeline.telemetry.curves import figure_of
from drivetrain.pipeline.telemetry.history import History, StepPoint
from pipeline_data import BATCH, TRAIN, Toy

STEPS = TRAIN // BATCH


class Losses:
    """A logger that keeps the losses of the steps, and their rates."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[float, float]] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        if "step/loss" in values:
            self.steps[step] = values["step/loss"], values["step/lr"]


class Fails(Callback):
    def on_step_end(self, view: RunView) -> None:
        if view.step == STEPS + 3:
            raise ZeroDivisionError


def test_they_are_those_that_a_logger_gets(toy: Toy, tmp_path: Path) -> None:
    logged = Losses()
    history = (
        toy.pipeline().fit(epochs=2, out=tmp_path, logger=logged, log_every=1, progress=False, checkpoints=None).history
    )
    assert [step.at for step in history.steps] == [round(number / STEPS, 4) for number in range(1, 2 * STEPS + 1)]
    assert [(step.loss, step.lr) for step in history.steps] == [*logged.steps.values()]
    saved = History.from_dict(json.loads((tmp_path / "history.json").read_text()))
    assert saved.steps == history.steps
    assert isinstance(saved.steps[0], StepPoint)


def test_a_long_run_has_as_many_as_a_picture_shows(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "POINTS", 3)
    history = toy.pipeline().fit(epochs=2, progress=False).history
    every = math.ceil(2 * STEPS / 3)
    assert [step.at for step in history.steps] == [
        round(number / STEPS, 4) for number in range(every, 2 * STEPS + 1, every)
    ]


@pytest.mark.long
def test_a_resumed_run_has_those_of_one_that_was_not_stopped(toy: Toy, tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2, "progress": False, "checkpoints": Checkpoints(every_steps=2)}
    pipeline = toy.pipeline()
    whole = pipeline.fit(out=tmp_path / "whole", **options).history
    with pytest.raises(ZeroDivisionError):
        pipeline.fit(out=tmp_path / "run", callbacks=[Fails()], **options)
    resumed = pipeline.fit(out=tmp_path / "run", resume=True, **options).history
    assert resumed.steps == whole.steps


def test_the_curves_show_them_and_a_rate_that_rises_within_an_epoch(toy: Toy) -> None:
    history = toy.pipeline().optimize("sgd", lr=0.1, warmup=0.25).fit(epochs=2, progress=False).history
    losses, _, rate, _ = figure_of(history).axes
    assert [*losses.lines[0].get_ydata()] == [step.loss for step in history.steps]
    assert [*rate.lines[0].get_xdata()] == [step.at for step in history.steps]
    highest = max(step.lr for step in history.steps)
    assert highest > max(epoch.lr for epoch in history.epochs)
    assert rate.get_ylim()[1] > highest
