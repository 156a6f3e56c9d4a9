"""`fit(logger=…)`: what each logger receives, what is rejected, and the effect of a failure; the curves of a run."""

import csv
import io
import json
import math
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from drivetrain import Callback, DrivetrainError, MissingExtra, PlanError, RunView
from drivetrain.common.pictures import BLUE, RED
from drivetrain.pipeline import Checkpoints, History, LoggerWarning
from drivetrain.pipeline.telemetry.curves import draw, figure_of
from drivetrain.pipeline.telemetry.history import Epoch
from drivetrain.pipeline.telemetry.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from pipeline_data import BATCH, RUN_FILES, TRAIN, Toy, left_in, living_threads, plain_model
from torch import nn

STEPS = TRAIN // BATCH  # in an epoch


class Notebook:
    """A logger as Weights & Biases' run is one."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.entries.append((step, data))


class Server:
    """A logger as the module `mlflow` is one."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        assert all(isinstance(value, float | int) for value in metrics.values())
        self.entries.append((step, metrics))


class Away:
    """A server that cannot be reached from its third entry on."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls += 1
        if self.calls > 2:
            raise ConnectionError(f"no answer to {len(values)} values of step {step}")


class ToFile:
    """Writes what it gets to a file; it is copied to rank 0's process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, values: dict[str, float], step: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {sorted(values)[0]}\n")


def fit(pipeline: Any, epochs: int, **arguments: Any) -> Any:
    return pipeline.fit(epochs=epochs, progress=False, **arguments)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def points_of(folder: Path, name: str) -> dict[int, float]:
    """A curve as TensorBoard shows it, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard")).Reload()
    points = [(event.step, event.value) for event in reader.Scalars(name)]
    assert len(dict(points)) == len(points)
    return dict(points)


def test_every_kind_of_logger_gets_every_figure(toy: Toy, tmp_path: Path) -> None:
    notebook, server, threads = Notebook(), Server(), living_threads()
    result = fit(toy.pipeline(), 2, out=tmp_path, logger=["csv", "tensorboard", notebook, server], log_every=1)
    first, last = result.history.epochs
    assert notebook.entries == server.entries
    assert [step for step, _ in notebook.entries] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert notebook.entries[-1][1] == last.values()
    steps = [values for _, values in notebook.entries if "epoch" not in values]
    assert sum(values["step/loss"] for values in steps[:STEPS]) / STEPS == pytest.approx(first.loss, abs=1e-6)
    for values in steps:
        assert values["step/lr"] == 0.1
        assert 0 <= values["step/data_wait_fraction"] <= 1
        assert values["step/images_per_s"] > 0

    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == [step for step, _ in notebook.entries]
    for row, (_, values) in zip(rows, notebook.entries, strict=True):
        assert {name: float(text) for name, text in row.items() if text and name != "step"} == values
    assert points_of(tmp_path, "top1") == pytest.approx({4: first.accuracy, 8: last.accuracy})
    assert len(points_of(tmp_path, "step/loss")) == 2 * STEPS
    assert left_in(tmp_path) == sorted([*RUN_FILES, "metrics.csv", "tensorboard"])
    assert living_threads() <= threads


class Logs(Callback):
    def on_step_end(self, view: RunView) -> None:
        view.log({"number": 1764184511.123456, "tensor": torch.tensor(0.1), "step": 0.5})


def test_what_a_callback_logs_is_not_rounded(toy: Toy, tmp_path: Path) -> None:
    fit(toy.pipeline(), 1, out=tmp_path, logger="csv", callbacks=[Logs()])
    assert [int(row["step"]) for row in rows_of(tmp_path)] == [1, 2, 3, 4, 4]  # not what the callback calls so
    row = rows_of(tmp_path)[0]
    assert (float(row["number"]), float(row["tensor"])) == (1764184511.123456, torch.tensor(0.1).item())


class LogsLarge(Callback):
    def on_step_end(self, view: RunView) -> None:
        view.log({"number": 2**70})


def test_a_callback_logs_an_integer_of_more_than_64_bits(toy: Toy, tmp_path: Path) -> None:
    fit(toy.pipeline(), 1, out=tmp_path, logger="csv", callbacks=[LogsLarge()])
    assert float(rows_of(tmp_path)[0]["number"]) == 2.0**70


def test_a_run_that_begins_again_or_goes_on_doubles_nothing(toy: Toy, tmp_path: Path) -> None:
    pipeline = toy.pipeline()
    both: dict[str, Any] = {"out": tmp_path, "logger": ["csv", "tensorboard"], "log_every": 1}
    fit(pipeline, 3, **both)
    second = fit(pipeline, 1, **both)  # the same cell, run again with fewer epochs
    assert [int(row["step"]) for row in rows_of(tmp_path)] == [1, 2, 3, 4, 4]
    assert points_of(tmp_path, "loss") == pytest.approx({4: second.history.epochs[0].loss})
    with (tmp_path / "metrics.csv").open("ab") as file:
        file.write(b"5,,,\xff")  # a process that was killed in the middle of a line, and a disk of bad bytes
    third = fit(pipeline, 2, **both, resume="auto")
    assert [int(row["step"]) for row in rows_of(tmp_path)] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    losses = [epoch.loss for epoch in third.history.epochs]
    assert [float(row["loss"]) for row in rows_of(tmp_path) if row["loss"]] == losses
    assert list(points_of(tmp_path, "loss").values()) == pytest.approx(losses)
    assert list(points_of(tmp_path, "step/loss")) == list(range(1, 9))


def test_an_epoch_that_is_evaluated_again_has_one_line(tmp_path: Path) -> None:
    """A run that was left after an epoch's last step, and failed between its evaluation and the checkpoint of that."""
    for step in (0, 4):
        logger = CSVLogger(tmp_path, step)
        logger.log({"step/loss": 1.0}, 4 + step)
        logger.log({"epoch": 1, "loss": 0.5 + step}, 4)
    assert [(row["step"], row["epoch"], row["loss"]) for row in rows_of(tmp_path)] == [
        ("4", "", ""), ("8", "", ""), ("4", "1", "4.5"),
    ]  # fmt: skip


def wandb_records(folder: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for file in sorted(folder.rglob("*.wandb")):
        data, at, content = file.read_bytes(), 7, b""
        while at < len(data):  # LevelDB's log: blocks of 32 KiB; CRC, length and kind before each fragment
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
            length, kind = struct.unpack_from("<HB", data, at + 4)
            content, at = content + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # a full one, or the last fragment
                yield Record.FromString(content)
                content = b""


def wandb_values(folder: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The configuration and the history in the files of offline runs of Weights & Biases, by its own messages."""
    config, history = dict[str, Any](), dict[int, dict[str, Any]]()
    for record in wandb_records(folder):
        update = [*record.run.config.update, *record.config.update]
        config |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in update}
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        history |= {row["_step"]: row} if row else {}
    return config, history


@pytest.mark.process
@pytest.mark.long
def test_loggers_get_the_hyperparameters(
    toy: Toy, tmp_path: Path, logging_services: tuple[ModuleType, ModuleType]
) -> None:
    """The services are real; a run that is resumed goes on there, too."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wandb, mlflow = logging_services
    out, names = tmp_path / "run", ["tensorboard", "wandb", "mlflow"]
    fit(toy.pipeline(), 1, out=out, logger=names)
    known = {name: (out / f"{name}-run.txt").read_text() for name in names[1:]}
    last = fit(toy.pipeline(), 2, out=out, logger=names, resume="auto").history.epochs[-1]
    assert known == {name: (out / f"{name}-run.txt").read_text() for name in known}
    config, history = wandb_values(out)
    assert (config["optimizer.lr"], config["epochs"], config["batch_size"]) == (0.1, 2, BATCH)
    assert {step: row["epoch"] for step, row in history.items()} == {4: 1, 8: 2}
    assert history[8]["top1"] == last.accuracy
    run = mlflow.get_run(known["mlflow"].strip())
    assert (run.data.params["optimizer.lr"], run.data.params["epochs"]) == ("0.1", "1")  # as it began
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in points] == [4, 8]
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", last.loss)
    reader = EventAccumulator(str(out / "tensorboard")).Reload()
    assert reader.Tags()["tensors"] == ["hyperparameters/text_summary"]

    own = wandb.init()  # objects of the user, which stay open; no recipe can express this pipeline
    with mlflow.start_run() as begun:
        fit(toy.pipeline(lambda: plain_model()), 1, logger=[own, mlflow])
        assert (own.config["optimizer.name"], own.config["optimizer.lr"]) == ("sgd", 0.1)
        own.finish()
    assert mlflow.get_run(begun.info.run_id).data.params["optimizer.name"] == "sgd"


@pytest.mark.process
@pytest.mark.long
@pytest.mark.usefixtures("logging_services", "own_cache")
def test_a_run_at_an_address_goes_on_in_the_service_and_a_new_one_does_not(toy: Toy, tmp_path: Path) -> None:
    """Nothing of the first run is left on this machine: it is like another one."""
    known = tmp_path / "store" / "mlflow-run.txt"
    both: dict[str, Any] = {"out": f"file://{known.parent}", "logger": "mlflow"}
    fit(toy.pipeline(), 1, **both)
    run = known.read_text()
    fit(toy.pipeline(), 2, **both, resume="auto")
    assert known.read_text() == run
    fit(toy.pipeline(), 1, out=both["out"])
    assert not known.exists()


def test_a_logger_that_refuses_hyperparameters_still_logs(toy: Toy) -> None:
    class Strict(Server):
        def log_params(self, params: dict[str, Any]) -> None:
            raise ValueError(f"{len(params)} are too many")

    strict = Strict()
    with pytest.warns(LoggerWarning, match="Strict did not take the hyperparameters: ValueError"):
        fit(toy.pipeline(), 1, logger=strict)
    assert strict.entries


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_that_is_not_installed(toy: Toy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"Install it with: pip install 'drivetrain\[{name}\]'"):
        fit(toy.pipeline(), 1, logger=name)


def test_logging_changes_no_number(toy: Toy) -> None:
    with_it = fit(toy.pipeline(), 1, logger=Notebook(), log_every=1)
    without = fit(toy.pipeline(), 1)
    torch.testing.assert_close(with_it.model.state_dict(), without.model.state_dict(), rtol=0, atol=0)


def test_a_logger_that_fails_warns_once_and_training_goes_on(toy: Toy) -> None:
    away, notebook = Away(), Notebook()
    with pytest.warns(LoggerWarning, match=r"Away failed at step 6 .*ConnectionError: no answer") as caught:
        result = fit(toy.pipeline(), 3, logger=[away, notebook], log_every=3)
    assert (len(caught), away.calls) == (1, 3)
    assert len(result.history.epochs) == 3
    assert [step for step, _ in notebook.entries] == [3, 4, 6, 8, 9, 12, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logger": "cvs"}, r"No logger is named 'cvs'\. Did you mean 'csv'"),
        ({"logger": "csv", "out": None}, r"Pass fit\(out=…\)"),
        ({"logger": ["csv", 3]}, r"logger=3 cannot log: it has neither log\(dict, step\) nor log_metrics"),
        ({"logger": ["csv", "csv"]}, r"names one twice, which would duplicate its entries"),
        ({"logger": "csv", "log_every": 0}, "log_every=0 must be a positive integer"),
        ({"log_every": True}, "log_every=True must"),
    ],
)
def test_what_cannot_log_is_refused_before_any_work(
    toy: Toy, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        fit(toy.pipeline(), 1, **{"out": tmp_path, **arguments})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
@pytest.mark.slow
def test_loggers_of_ranks_that_are_started(toy: Toy, tmp_path: Path) -> None:
    """Names and objects work on rank 0; what cannot travel is an error before any rank is started."""
    pipeline = toy.pipeline().distribute("ddp", devices=2)
    stuck = Notebook()
    stuck.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=r"cannot be sent to the process of rank 0 \(TypeError"):
        fit(pipeline, 1, logger=stuck)
    fit(pipeline, 1, out=tmp_path, logger=["csv", "tensorboard", ToFile(tmp_path / "own")], log_every=2)
    assert (
        tmp_path / "own"
    ).read_text() == "2 step/data_wait_fraction\n4 step/data_wait_fraction\n4 data_wait_fraction\n"
    assert [int(row["step"]) for row in rows_of(tmp_path)] == [2, 4, 4]
    assert len(points_of(tmp_path, "step/loss")) == 2
    assert left_in(tmp_path) == sorted([*RUN_FILES, "metrics.csv", "own", "tensorboard"])


def epoch(number: int, accuracy: float | None, loss: float = 1.0) -> Epoch:
    return Epoch(
        number, loss / number, accuracy and loss / number, {} if accuracy is None else {"top1": accuracy},
        1000.0, 0.1, 9.0, 0.1 / number,
    )  # fmt: skip


@pytest.mark.parametrize("epochs", [[epoch(1, 0.5)], [epoch(1, None), epoch(2, None)], [epoch(1, 0.5), epoch(2, 0.7)]])
def test_curves_of_short_runs_and_of_those_without_validation(epochs: list[Epoch]) -> None:
    image = Image.open(io.BytesIO(draw(History(epochs, {})))).convert("RGB")
    colors = {color for _, color in image.getcolors(1 << 24) or []}
    drawn = [tuple(bytes.fromhex(color[1:])) in colors for color in (BLUE, RED)]
    assert drawn == [True, epochs[0].accuracy is not None]


def test_one_value_far_above_does_not_flatten_the_curves() -> None:
    losses = [2.0, 1.5, 99.9, 1.2, 1.1]
    epochs = [replace(epoch(number, 0.5), val_loss=loss, loss=1.0) for number, loss in enumerate(losses, 1)]
    panel = figure_of(History(epochs, {})).axes[0]
    assert panel.get_ylim()[1] < 3
    (text,) = (one for one in panel.texts if "↑" in one.get_text())
    assert text.get_text() == "99.9 ↑"
    assert text.xy[0] == 3
    steady = [replace(one, val_loss=1.0) for one in epochs]
    assert not figure_of(History(steady, {})).axes[0].texts


def test_rates_and_throughputs_are_drawn_whole() -> None:
    epochs = [
        replace(epoch(number, 0.5), lr=0.1 if number == 1 else 0.01, images_per_s=3000.0 if number == 1 else 1000.0)
        for number in range(1, 9)
    ]
    _, _, rate, speed = figure_of(History(epochs, {})).axes
    for panel, highest in ((rate, 0.1), (speed, 3000)):
        assert panel.get_ylim() == (0, pytest.approx(1.12 * highest))
        assert not panel.texts


def test_names_with_dollar_signs_are_not_mathematics() -> None:
    """They are drawn as they are: as mathematics, these would be errors."""
    monitor: dict[str, Any] = {"name": r"of $\frac$", "higher_is_better": True, "unit": None}
    one = replace(epoch(1, 0.5), metrics={monitor["name"]: 0.5})
    assert draw(History([one], {"recipe": r"$\frac$.yaml", "monitor": monitor}))


class Diverging(nn.Module):
    """Its loss is infinite in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.steps = plain_model(), 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        logits: torch.Tensor = self.layers(images)
        return logits * (math.inf if self.steps > STEPS + 2 else 1.0)


def test_a_run_that_fails_leaves_the_curves_of_what_it_did(toy: Toy, tmp_path: Path) -> None:
    import matplotlib.backends.backend_agg  # after Ctrl-C, curves are drawn only if this need not be imported

    assert matplotlib.backends.backend_agg

    class Ends:
        def log(self, values: dict[str, float], step: int) -> None:  # noqa: ARG002
            if step > STEPS:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(toy.pipeline(plain_model), 2, out=tmp_path, logger=Ends(), log_every=1)
    assert left_in(tmp_path) == RUN_FILES
    with pytest.raises(DrivetrainError, match="the loss is"):
        fit(toy.pipeline(Diverging), 2, out=tmp_path, checkpoints=Checkpoints(keep=1))
    assert len(json.loads((tmp_path / "history.json").read_text())["epochs"]) == 1
    assert (tmp_path / "curves.png").exists()


def test_a_logger_that_fails_at_the_end_does_not_end_the_run(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(_: TensorBoardLogger) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setattr(TensorBoardLogger, "close", close)
    with pytest.warns(LoggerWarning, match="TensorBoardLogger failed at its end.*ConnectionError: no answer"):
        result = fit(toy.pipeline(), 1, out=tmp_path, logger=["tensorboard", "csv"])
    assert len(result.history.epochs) == 1


@pytest.mark.process
def test_a_logger_that_was_disabled_is_closed(
    toy: Toy, logging_services: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's run would stay the process's active one, and the next fit's would be nested in it."""
    _, mlflow = logging_services

    def fail(metrics: dict[str, float], step: int) -> None:
        raise ConnectionError(f"no answer to {len(metrics)} values of step {step}")

    monkeypatch.setattr(mlflow, "log_metrics", fail)
    with pytest.warns(LoggerWarning, match="MLflowLogger failed at step 4"):
        fit(toy.pipeline(), 1, logger="mlflow")
    assert mlflow.active_run() is None


@pytest.mark.process
def test_a_run_that_failed_has_failed_in_the_services(
    toy: Toy, tmp_path: Path, logging_services: tuple[ModuleType, ModuleType]
) -> None:
    class Broken(Callback):
        def on_epoch_end(self, view: RunView) -> None:
            raise ValueError(f"at step {view.step}")

        def on_fit_end(self, view: RunView) -> None:
            view.log({"failed": float(view.failed)})

    _, mlflow = logging_services
    with pytest.raises(ValueError, match="at step 4"):
        fit(toy.pipeline(), 1, out=tmp_path, logger=["mlflow", "wandb"], callbacks=[Broken()])
    run = mlflow.get_run((tmp_path / "mlflow-run.txt").read_text().strip())
    assert run.info.status == "FAILED"
    assert run.data.metrics["failed"] == 1  # before the run of the service ended
    assert mlflow.active_run() is None
    assert [each.exit.exit_code for each in wandb_records(tmp_path) if each.HasField("exit")] == [1]
