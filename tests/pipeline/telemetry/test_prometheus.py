"""`logger="prometheus"`: the newest values of a run, in Prometheus' text format."""

import math
import re
import time
from pathlib import Path

import pytest
from drivetrain.pipeline.runs.analysis.watch import look
from drivetrain.pipeline.telemetry.loggers import PrometheusLogger
from pipeline_data import BATCH, TRAIN, Toy

# Of the exposition format: names, and labels whose values have escaped quotes, backslashes and line feeds.
LINE = re.compile(r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{run="(?P<run>(?:[^"\\\n]|\\["\\n])*)"\} (?P<value>\S+)')


def parsed(path: Path) -> dict[str, float]:
    """Read a file strictly: each sample after its type."""
    text = path.read_text()
    assert text.endswith("\n")
    lines = text.splitlines()
    found = {}
    for kind, line in zip(lines[::2], lines[1::2], strict=True):
        match = LINE.fullmatch(line)
        assert match, line
        assert kind == f"# TYPE {match['name']} gauge"
        assert match["name"] not in found
        found[match["name"]] = float(match["value"].replace("Inf", "inf"))
    return found


def test_a_run_has_its_newest_values(toy: Toy, tmp_path: Path) -> None:
    begin = time.time()
    history = (
        toy.pipeline()
        .fit(epochs=2, out=tmp_path, logger="prometheus", log_every=1, progress=False, checkpoints=None)
        .history
    )
    found, last = parsed(tmp_path / "metrics.prom"), history.epochs[-1]
    assert found["drivetrain_epoch"] == 2
    assert found["drivetrain_step"] == 2 * (TRAIN // BATCH)
    assert found["drivetrain_val_loss"] == last.val_loss
    assert found["drivetrain_top1"] == last.metrics["top1"]
    assert found["drivetrain_step_loss"] == history.steps[-1].loss
    assert found["drivetrain_step_lr"] == history.steps[-1].lr
    assert begin <= found["drivetrain_updated_seconds"] <= time.time()


def test_a_new_run_has_no_values_of_the_one_before(toy: Toy, tmp_path: Path) -> None:
    toy.pipeline().fit(epochs=1, out=tmp_path, logger="prometheus", progress=False)
    toy.pipeline().fit(epochs=1, out=tmp_path, progress=False)
    assert not (tmp_path / "metrics.prom").exists()


@pytest.mark.usefixtures("own_cache")
def test_a_run_that_continues_without_gauges_has_none_of_before(toy: Toy, tmp_path: Path) -> None:
    """`drivetrain watch` would show the step and the loss of where it was left."""
    out = f"file://{tmp_path}/store"
    toy.pipeline().fit(epochs=1, out=out, logger="prometheus", progress=False)
    assert "step" in look(out).newest
    toy.pipeline().fit(epochs=2, out=out, resume="auto", progress=False)
    state = look(out)
    assert (state.summary.epochs, state.newest) == (2, {})


def test_any_folder_name_and_value_can_be_written(tmp_path: Path) -> None:
    folder = tmp_path / 'a "run"\\of\nmine'
    folder.mkdir()
    logger = PrometheusLogger(folder, 0)
    assert parsed(folder / "metrics.prom")["drivetrain_step"] == 0  # before the first entry
    logger.log({"norm/layer 1": math.nan, "step/loss": math.inf, "low": -math.inf}, 7)
    found = parsed(folder / "metrics.prom")
    assert math.isnan(found["drivetrain_norm_layer_1"])
    assert (found["drivetrain_step_loss"], found["drivetrain_low"]) == (math.inf, -math.inf)
    assert found["drivetrain_step"] == 7
    assert [path.name for path in folder.iterdir()] == ["metrics.prom"]


def test_metrics_that_prometheus_does_not_distinguish_have_a_number(tmp_path: Path) -> None:
    """A file with a name twice would be refused as a whole. The names of a run's own metrics stay."""
    logger = PrometheusLogger(tmp_path, 0)
    logger.log({"step_loss": 1.0, "updated seconds": 2.0, "norm/a b": 3.0, "norm/a.b": 4.0, "rank/own_seconds": 5.0}, 1)
    logger.log({"step/loss": 6.0, "norm/a.b": 7.0}, 2)
    found = parsed(tmp_path / "metrics.prom")
    assert (found["drivetrain_step_loss"], found["drivetrain_step_loss_2"]) == (6, 1)
    assert (found["drivetrain_norm_a_b"], found["drivetrain_norm_a_b_2"]) == (3, 7)
    assert found["drivetrain_updated_seconds_2"] == 2 != found["drivetrain_updated_seconds"]
    assert found["drivetrain_rank_own_seconds_2"] == 5
