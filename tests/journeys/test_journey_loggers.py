"""Job 8: TensorBoard, Weights & Biases (offline), MLflow (files) and CSV get curves and hyperparameters."""

import csv
from pathlib import Path
from types import ModuleType

import pytest
from journey_models import photos


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
def test_four_loggers_by_name(logging_services: tuple[ModuleType, ModuleType]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = ["csv", "tensorboard", "wandb", "mlflow"]
    result = photos().fit(epochs=2, out="runs/logged", logger=loggers, log_every=1, progress=False)
    top1 = [epoch.metrics["top1"] for epoch in result.history.epochs]
    with Path("runs/logged/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["top1"]) for row in rows if row["top1"]] == top1
    assert sum(bool(row["step/loss"]) for row in rows) == 6
    board = EventAccumulator("runs/logged/tensorboard").Reload()
    assert [event.value for event in board.Scalars("top1")] == pytest.approx(top1)
    assert board.Tags()["tensors"] == ["hyperparameters/text_summary"]
    _, mlflow = logging_services
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.params["optimizer.lr"] == "0.003"
    assert run.data.metrics["top1"] == pytest.approx(top1[-1])
    (file,) = Path().rglob("*.wandb")
    assert all(text in file.read_bytes() for text in (b"optimizer.lr", b"0.003", b"val_loss"))
