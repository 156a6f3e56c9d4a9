"""`drivetrain watch`: a run that another process trains, and one that has ended."""

import io
import json
import re
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from command_line import call, done
from drivetrain import Callback, Checkpoints, EarlyStopping, RunView
from drivetrain.pipeline import compare_runs, load_run
from drivetrain.pipeline.apps.cli.app import main
from drivetrain.pipeline.apps.cli.watch import _drawn
from drivetrain.pipeline.runs.analysis import watch
from drivetrain.pipeline.runs.report import Report
from drivetrain.pipeline.telemetry.loggers import PrometheusLogger
from pipeline_data import BATCH, TRAIN, StopsAt, Toy, plain_model
from torch import nn

STEPS = TRAIN // BATCH


def test_a_line_that_is_wider_than_the_terminal_is_drawn_over_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long, short = "run: " + "loss 0.1234, " * 8, "run: finished"
    rows = _drawn(long, 1)
    first = capsys.readouterr().out
    assert first.startswith("\r\033[J")
    assert rows == first.count("\n") + 1 > 2
    assert max(map(len, first.removeprefix("\r\033[J").split("\n"))) < 40
    assert _drawn(short, rows) == 1
    assert capsys.readouterr().out == f"\033[{rows - 1}A\r\033[J{short}"
    assert _drawn(short, 1) == 1
    assert capsys.readouterr().out == f"\r\033[J{short}"


def test_a_finished_run(toy: Toy, tmp_path: Path) -> None:
    history = toy.named().fit(epochs=2, out=tmp_path / "run", progress=False).history
    text = done("watch", str(tmp_path / "run"))  # it ends by itself
    assert text.startswith(f"run: 2 of 2 epochs, loss {history.epochs[-1].loss:.4f}, ")
    assert f"{history.latest}, best " in text
    assert text.endswith(", finished\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "drawn"), [("xterm", True), ("dumb", False)])
def test_a_terminal_without_control_sequences_gets_none(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, kind: str, drawn: bool
) -> None:
    toy.named().fit(epochs=1, out=tmp_path, progress=False, checkpoints=None)
    monkeypatch.setenv("TERM", kind)
    with redirect_stdout(Terminal()) as screen, pytest.raises(SystemExit):
        main(["watch", str(tmp_path)])
    assert ("\033[" in screen.getvalue()) is drawn
    assert screen.getvalue().endswith("finished\n")


def test_the_working_directory_has_a_name(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.pipeline().fit(epochs=1, out=tmp_path / "run", progress=False, checkpoints=None)
    monkeypatch.chdir(tmp_path / "run")
    assert f"{watch.look('.')}".startswith("run: 1 of 1 epochs, ")
    assert Report.of(".", pytest.fail).title == "run"


def test_the_newest_metrics_of_a_step(toy: Toy, tmp_path: Path) -> None:
    history = toy.named().fit(
        epochs=1, out=tmp_path, logger="prometheus", log_every=1, progress=False, checkpoints=None
    ).history  # fmt: skip
    text = done("watch", str(tmp_path), "--once")
    assert f"step {STEPS}, loss {history.steps[-1].loss:.4f}, " in text
    assert ", waiting " in text


def test_a_run_that_a_callback_stopped(toy: Toy, tmp_path: Path) -> None:
    stop = EarlyStopping(patience=1, min_delta=1.0)
    toy.named().fit(epochs=9, out=tmp_path, callbacks=[stop], progress=False)
    assert ", stopped: " in done("watch", str(tmp_path))


class Looks(Callback):
    """At the run's folder, after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, list[tuple[bool, dict[str, float]]]()

    def on_step_end(self, view: RunView) -> None:  # noqa: ARG002
        self.seen.append((watch.look(self.folder).ended, load_run(self.folder).metrics))


def test_a_stopped_run_that_continues_has_not_ended(toy: Toy, tmp_path: Path) -> None:
    """Its folder has the results of the stop until the next epoch ends."""
    looks = Looks(tmp_path)
    options: dict[str, Any] = {"epochs": 1, "out": tmp_path, "progress": False}
    stopped = toy.named().fit(callbacks=[StopsAt(STEPS - 1)], **options)
    assert watch.look(tmp_path).ended
    result = toy.named().fit(callbacks=[looks], resume="auto", continue_stopped=True, **options)
    assert looks.seen == [(False, stopped.metrics)]
    assert "continued" not in result.history.facts
    assert done("watch", str(tmp_path)).endswith(", finished\n")


def test_a_stopped_run_that_continues_is_loaded_after_an_evaluation_within_the_epoch(toy: Toy, tmp_path: Path) -> None:
    """Its history is written there, and the weights are still those of the stop."""
    looks = Looks(tmp_path)
    options: dict[str, Any] = {"epochs": 1, "out": tmp_path, "progress": False, "eval_every_steps": 2}
    toy.named().fit(callbacks=[StopsAt(1)], **options)
    result = toy.named().fit(callbacks=[looks], resume="auto", continue_stopped=True, **options)
    assert [ended for ended, _ in looks.seen] == [False] * (STEPS - 1)
    assert not {"stopped", "continued"} & result.history.facts.keys()
    assert "stopped" not in json.loads((tmp_path / "history.json").read_text())


class Fails(Callback):
    """In the second epoch."""

    def on_step_end(self, view: RunView) -> None:
        if view.step > STEPS:
            raise ZeroDivisionError


def test_a_run_without_a_recipe_is_not_finished_before_its_last_epoch(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline(nn.Sequential(plain_model()))
    saved = Checkpoints(background=False)
    options: dict[str, Any] = {"out": tmp_path, "progress": False, "checkpoints": saved}
    with pytest.raises(ZeroDivisionError):
        pipeline.fit(epochs=3, callbacks=[Fails()], **options)
    assert not (tmp_path / "recipe.yaml").exists()
    assert not watch.look(tmp_path).ended
    assert "1 of 3 epochs, " in done("watch", str(tmp_path), "--once")
    assert compare_runs([tmp_path]).runs[0].problem == "it is unfinished, 1 of 3 epochs"
    report = tmp_path / "report.html"
    done("report", str(tmp_path), "--out", str(report))
    assert "Unfinished: 1 of 3 epochs." in report.read_text()
    pipeline.fit(epochs=2, resume="auto", **options)
    assert done("watch", str(tmp_path)).endswith(", finished\n")


TRAINS = """
import sys, time
from drivetrain import Callback, Pipeline

class Slow(Callback):
    def on_step_end(self, view):
        time.sleep(0.1)

Pipeline("cifar_resnet", num_classes=4, width=4).load(sys.argv[1], batch_size=32, image_size=16, workers=1).fit(
    epochs=3, out=sys.argv[2], logger="prometheus", log_every=1, callbacks=[Slow()], progress=False
)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
@pytest.mark.timeout(100)
def test_a_run_of_another_process_is_followed_to_its_end(toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", TRAINS, toy.train, str(run)]) as training:
        while not (run / "metrics.prom").exists():
            assert training.poll() is None
            time.sleep(0.05)
        lines = done("watch", str(run), "--every", "0.05").splitlines()
        assert training.wait(60) == 0
    steps = [int(line.partition("step ")[2].partition(",")[0]) for line in lines]
    assert steps == sorted(steps)
    assert len({*steps}) > 3
    assert re.search(r", last change \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$", lines[0])
    assert lines[-1].startswith("run: 3 of 3 epochs, step ")
    assert lines[-1].endswith(", finished")


def test_a_run_that_begins_has_its_metrics_first(tmp_path: Path) -> None:
    PrometheusLogger(tmp_path, 0)
    assert ": 0 epochs, step 0, " in done("watch", str(tmp_path), "--once")


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_run_by_another_clock_has_its_time(toy: Toy, tmp_path: Path, seconds: float) -> None:
    """That of a machine or a store whose clock is an hour off, which is not news of an hour ago."""
    toy.named().fit(epochs=1, out=tmp_path, logger="prometheus", progress=False)
    at, path = time.time() - seconds, tmp_path / "metrics.prom"
    lines = [
        f"{line.rpartition(' ')[0]} {at}" if line.startswith("drivetrain_updated_seconds") else line
        for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text((tmp_path / "recipe.yaml").read_text().replace("epochs: 1", "epochs: 5"))
    moment = f"last change {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    text = done("watch", str(tmp_path), "--once")
    assert text.endswith(f", {moment}\n")
    assert "no news" not in text
    assert str(replace(watch.look(tmp_path), quiet=600)).endswith(f", no news for 10 min, {moment}")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"drivetrain_step{\n{} 1e\n", b"drivetrain_step_loss{a} x"])
def test_a_damaged_file_of_metrics_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.prom"
    path.write_bytes(content)
    assert watch._gauges(path) == {}


def test_what_is_not_a_run(tmp_path: Path) -> None:
    for place, words in (
        (tmp_path, "is not a run: it is no run"),
        (tmp_path / "no", "there is no such folder"),
    ):
        end = call("watch", str(place))
        assert end.code == 1
        assert words in end.err
    assert "--every=0.0 must be a finite number above 0: seconds" in call("watch", str(tmp_path), "--every", "0").err
