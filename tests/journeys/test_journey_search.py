"""Job 6: rates by a sweep, by the learning-rate range test, and by Optuna; runs beside each other."""

import json
from pathlib import Path

import optuna
import pytest
from command_line import call
from drivetrain import OptunaPruning, Pipeline
from journey_models import photos


@pytest.mark.process
@pytest.mark.long
def test_a_sweep_and_its_runs() -> None:
    sweep = ["sweep", "mine.yaml", "optimizer.lr=0.0001,0.01", "--out", "sweeps/lr", "--jobs", "2"]
    end = call(*sweep)
    assert end.code == 0, end
    assert end.out.count("1/1") == 2
    again = call(*sweep, "--json")  # nothing is trained again
    assert again.code == 0, again
    runs = sorted(str(path.parent) for path in Path("sweeps/lr").glob("*/recipe.yaml"))
    assert len(runs) == 2
    end = call("compare", *runs, "--out", "curves.png", "--json")
    assert end.code == 0, end
    assert [run["recipe"] for run in json.loads(end.out)["runs"]] == [
        {"optimizer.lr": 0.0001}, {"optimizer.lr": 0.01}
    ]  # fmt: skip
    assert Path("curves.png").stat().st_size > 1000


@pytest.mark.long
def test_the_range_of_learning_rates() -> None:
    found = photos().optimize("sgd", lr=0.1).lr_range(steps=40)
    assert found.suggestion is not None
    assert 1e-5 < found.suggestion < 10
    assert str(found.suggestion)[:4] in str(found) or f"{found.suggestion:.2g}" in str(found)
    found.save("lr.png")
    assert Path("lr.png").exists()


@pytest.mark.long
def test_optuna_ends_a_trial() -> None:
    """The first trials learn; the third does not, and ends after its first epoch."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rates = [0.01, 0.02, 1e-9]

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_categorical("lr", rates)
        pipeline = photos().optimize("adamw", lr=lr, schedule="constant")
        callbacks = [OptunaPruning(trial, "val_loss")]
        result = pipeline.fit(epochs=4, out=f"search/{trial.number}", callbacks=callbacks, progress=False)
        return result.metrics["val_loss"]

    study = optuna.create_study(direction="minimize", pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
    for lr in rates:
        study.enqueue_trial({"lr": lr})
    study.optimize(objective, n_trials=3)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert study.best_params["lr"] in rates[:2]
    comparison = Pipeline.compare(*(f"search/{trial.number}" for trial in study.trials))
    assert [run.epochs for run in comparison.runs][:2] == [4, 4]
    assert comparison.runs[2].epochs < 4
    assert comparison.differences["optimizer.lr"] == tuple(rates)
