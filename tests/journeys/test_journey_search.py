"""Job 6: rates by a sweep, by the learning-rate range test, and by Optuna; runs beside each other."""

import json
from pathlib import Path

import optuna
import pytest
from command_line import done
from drivetrain import OptunaPruning, Pipeline
from journey_models import photos

pytestmark = pytest.mark.long


@pytest.mark.slow
@pytest.mark.process
def test_a_sweep_and_its_runs() -> None:
    sweep = ["sweep", "mine.yaml", "optimizer.lr=0.0001,0.01", "--out", "sweeps/lr", "--jobs", "2"]
    assert done(*sweep).count("optimizer.lr=") == 2
    runs = sorted(str(path.parent) for path in Path("sweeps/lr").glob("*/history.json"))
    written = [Path(run, "history.json").read_bytes() for run in runs]
    done(*sweep)  # nothing is trained again
    assert [Path(run, "history.json").read_bytes() for run in runs] == written
    found = json.loads(done("compare", *runs, "--out", "curves.png", "--json"))["runs"]
    assert [run["recipe"]["optimizer.lr"] for run in found] == [0.0001, 0.01]
    assert Path("curves.png").stat().st_size > 1000


def test_the_range_of_learning_rates() -> None:
    found = photos().lr_range(steps=40)
    assert found.suggestion is not None
    assert 1e-6 < found.suggestion < 1
    found.save("lr.png")
    assert Path("lr.png").exists()


def test_optuna_ends_a_trial() -> None:
    """The first two trials learn. The third does not, and ends early."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rates = [0.001, 0.002, 1e-9]

    def objective(trial: optuna.Trial) -> float:
        tuned = photos(val="train.beton").optimize("adamw", lr=trial.suggest_categorical("lr", rates))
        callbacks, out = [OptunaPruning(trial, "val_loss")], f"search/{trial.number}"
        return tuned.fit(epochs=4, out=out, callbacks=callbacks, progress=False).metrics["val_loss"]

    study = optuna.create_study(direction="minimize", pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
    for lr in rates:
        study.enqueue_trial({"lr": lr})
    study.optimize(objective, n_trials=3)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert study.best_params["lr"] in rates[:2]
    comparison = Pipeline.compare(*(f"search/{trial.number}" for trial in study.trials))
    first, second, third = [run.epochs for run in comparison.runs]
    assert first == second == 4 > third
    assert comparison.differences["optimizer.lr"] == tuple(rates)
